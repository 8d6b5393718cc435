"""A run of `vlmrl rl` that makes one step each time it is asked: what the comparisons of this folder are made of."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.placement import plan
from vlmrl.cluster.roles import plan_arguments
from vlmrl.cluster.session import session
from vlmrl.commands.preflight import actor_adapter_plan, critic_adapter_plan
from vlmrl.config.run import RlConfig
from vlmrl.config.schedule import last_step
from vlmrl.plugins import processor_of
from vlmrl.trainer.collect import PromptBudget
from vlmrl.trainer.rl import LoopState, train

Measured = dict[str, float]
"""`seconds` of a step, `<phase>_s` of its phases, and the step's metrics under their own names."""


@contextmanager
def run_by_steps(config: RlConfig) -> Iterator[Iterator[Measured]]:
    """The parts that `vlmrl rl` puts together, without evaluation, checks, files and screen.

    Several runs may be open at once; they share a Ray session, and each has engines and learners of its own.
    """
    clock = _Clock()
    with session() as machines, ExitStack() as stack:
        builder = RoleBuilder(machines, plan(**plan_arguments(config, machines)), stack)
        prompts = builder.prompts(config, _say)
        tools = processor_of(config.actor.model_name_or_path, config.data)
        engines, policy, weight_sync, reference, critic, reward_sources = builder.roles(
            config,
            tools,
            adapter=actor_adapter_plan(config, tools),
            critic_adapter=critic_adapter_plan(config),
            num_rows=prompts.num_rows,
            report=clock,
        )
        weight_sync.sync(0)
        budget = PromptBudget(prompts.num_rows * config.train.num_episodes)

        def steps() -> Iterator[Measured]:
            for step in range(1, last_step(config, prompts.num_rows) + 1):
                started = time.perf_counter()
                train(
                    config,
                    prompts=prompts,
                    engine=engines,
                    rewarder=reward_sources,
                    policy=policy,
                    weight_sync=weight_sync,
                    reference=reference,
                    critic=critic,
                    report=clock,
                    check_responses=lambda step, groups: {},
                    check_sync=lambda version: {},
                    after_step=lambda step, batch: {
                        "prompt/tokens_mean": statistics.fmean(len(group.prompt.tokens) for group in batch.groups)
                    },
                    save=lambda step, state: None,
                    first_step=step,
                    last_step=step,
                    budget=budget,
                    state=LoopState(config.algo.kl.init_coef),
                )
                yield {"seconds": time.perf_counter() - started} | clock.take()

        yield steps()


class _Clock:
    """The report of a run that wants nothing but numbers."""

    def __init__(self) -> None:
        self._found: Measured = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._found[f"{name}_s"] = time.perf_counter() - started

    def say(self, what: str) -> None:
        _say(what)

    def generated(self, done: int, total: int) -> None:
        """Nothing is shown."""

    def step(self, step: int, metrics: Measured) -> None:
        self._found |= metrics

    def take(self) -> Measured:
        found, self._found = self._found, {}
        return found


def rounded(found: Measured) -> Measured:
    """Fit to be read: three digits behind the point, more where there is nothing in front of it."""
    return {name: round(value, 3) if abs(value) >= 0.1 else float(f"{value:.3g}") for name, value in found.items()}


def medians(steps: Sequence[Measured], names: Sequence[str]) -> Measured:
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """For people, on stderr: stdout is for programs."""
    for row in (header, *rows):
        cells = (cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row)
        print("".join(f"{cell:>14}" for cell in cells), file=sys.stderr, flush=True)


def _say(what: Any) -> None:
    print(what, file=sys.stderr, flush=True)
