"""Run `vlmrl rl` one step at a time, so that benchmarks can compare several runs in turn."""

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
from vlmrl.commands.rl import start_roles
from vlmrl.config.num_steps import last_step
from vlmrl.config.verbs import RlConfig
from vlmrl.plugins import processor_of
from vlmrl.trainer.collect import PromptBudget
from vlmrl.trainer.rl import LoopState, train
from vlmrl.trainer.rollouts import InTurn

Measurements = dict[str, float]
"""`seconds` of a step, `<phase>_s` of its phases, and its metrics."""


@contextmanager
def run_by_steps(config: RlConfig) -> Iterator[Iterator[Measurements]]:
    """Start the roles of `vlmrl rl`, without checks, files and progress display; yield an iterator over steps.

    Several runs may be open at once. They share a Ray session, but have separate engines and learners.
    """
    clock = _Clock()
    with session() as machines, ExitStack() as stack:
        builder = RoleBuilder(machines, plan(**plan_arguments(config, machines)), stack)
        processor = processor_of(config.actor.model_name_or_path, config.data)
        adapter, critic_adapter = actor_adapter_plan(config, processor), critic_adapter_plan(config)
        prompts, _, roles = start_roles(
            config, processor, builder, clock, adapter=adapter, critic_adapter=critic_adapter
        )
        roles.weight_sync.sync(0)
        budget = PromptBudget(prompts.num_rows * config.train.num_episodes)

        rollouts = InTurn(config, prompts=prompts, engine=roles.engines, rewarder=roles.reward_sources, report=clock)

        def steps() -> Iterator[Measurements]:
            for step in range(1, last_step(config, prompts.num_rows) + 1):
                started = time.perf_counter()
                train(
                    config,
                    rollouts=rollouts,
                    rewarder=roles.reward_sources,
                    policy=roles.policy,
                    weight_sync=roles.weight_sync,
                    reference=roles.reference,
                    critic=roles.critic,
                    report=clock,
                    check_responses=lambda step, groups: dict,
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
    """A run report that records only numbers."""

    def __init__(self) -> None:
        self._measurements: Measurements = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._measurements[f"{name}_s"] = time.perf_counter() - started

    def say(self, what: str) -> None:
        _print_to_stderr(what)

    def generated(self, done: int, total: int) -> None:
        """Ignore progress."""

    def step(self, step: int, metrics: Measurements) -> None:
        self._measurements |= metrics

    def take(self) -> Measurements:
        measurements, self._measurements = self._measurements, {}
        return measurements


def rounded(measurements: Measurements) -> Measurements:
    """Round for display: to three decimals, and values below 0.1 to three significant digits."""
    return {
        name: round(value, 3) if abs(value) >= 0.1 else float(f"{value:.3g}") for name, value in measurements.items()
    }


def medians(steps: Sequence[Measurements], names: Sequence[str]) -> Measurements:
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table to stderr, because stdout has JSON lines."""
    for row in (header, *rows):
        cells = (cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row)
        print("".join(f"{cell:>14}" for cell in cells), file=sys.stderr, flush=True)


def _print_to_stderr(what: Any) -> None:
    print(what, file=sys.stderr, flush=True)
