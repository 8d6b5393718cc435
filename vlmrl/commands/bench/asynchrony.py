"""`vlmrl bench async`: seconds per step of synchronous and asynchronous runs, in turn on the same roles."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from rich.console import Console

from vlmrl.cluster.build import RoleBuilder, Roles
from vlmrl.cluster.placement import plan
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.role_settings import engine_settings
from vlmrl.cluster.roles import plan_arguments
from vlmrl.cluster.session import Session, session
from vlmrl.cluster.sync_plan import check_devices
from vlmrl.commands.bench.output import print_json, print_table
from vlmrl.commands.bench.speedup import Mode, Seconds, averaged, modes, results, warm_up
from vlmrl.commands.rl import make_rollouts
from vlmrl.commands.rl_checks import make_checks
from vlmrl.config.agent import Agent
from vlmrl.config.bench import Asynchrony
from vlmrl.config.bench_verbs import AsyncBench
from vlmrl.config.verbs import RlConfig
from vlmrl.observe.progress import Progress
from vlmrl.plugins import Processor, processor_of
from vlmrl.rollout.settings import EngineSettings
from vlmrl.trainer.ahead import Ahead
from vlmrl.trainer.collect import PromptBudget
from vlmrl.trainer.rl import LoopState, train
from vlmrl.types import Metrics

if TYPE_CHECKING:
    from vlmrl.commands.bench.given_lengths import GivenLengthEngine

_HERE = Path(__file__).parent
_ENVIRONMENT = f"{_HERE / 'waiting_environment.py'}:make"
_REWARD = str(_HERE / "parity_reward.py")
_MESSAGE_TOKENS = 128
"""More than any message of the environment has, even with one token per character."""
_ENGINE_CORE = "VLLM::"
"""Beginning of the title of vLLM's processes."""
_SIGMA = 1.0
_LARGEST = 16
"""Longest response, as a multiple of the median: one in 360 would be longer."""


def asynchrony(config: AsyncBench) -> None:
    """Run the training loop in each mode for a few steps, in turn, and compare seconds per step with the bound."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, config)
        largest = Mode(max(config.bench.queue_sizes), partial=True)
        settings = {mode: run_settings(config, mode, rows) for mode in (*modes(config.bench.queue_sizes), largest)}
        with _roles(settings[largest]) as (machines, loop):
            rounds: dict[Mode, list[Seconds]] = {}
            for number in range(config.bench.rounds):
                for mode in modes(config.bench.queue_sizes):
                    averages = loop.run(settings[mode], mode, config.bench)
                    seconds = Seconds(averages["time/step_s"], averages["time/rollout_s"])
                    rounds.setdefault(mode, []).append(seconds)
                    _print(config, machines, mode, number, averages)
        _summarize(config, rounds)


def steps_of(mode: Mode, bench: Asynchrony) -> int:
    """Steps of a mode in one round, those included that are left out of the averages."""
    return warm_up(bench.queue_sizes) + bench.steps + mode.queue


def write_rows(file: Path, config: AsyncBench) -> None:
    """Write the rows of a round, which each mode begins anew."""
    bench, rng = config.bench, np.random.default_rng(config.train.seed)
    num_steps = max(steps_of(mode, bench) for mode in modes(bench.queue_sizes))
    with file.open("w") as stream:
        for number in range(num_steps * config.rollout.batch_size):
            factor = np.exp(_SIGMA * rng.standard_normal()) if bench.workload == "long_tail" else 1.0
            tokens = max(2, round(bench.response_tokens * min(factor, _LARGEST)))
            columns = {"step_s": bench.step_s, "turns": bench.turns, "response_tokens": tokens}
            stream.write(json.dumps({"input": f"This is question {number}."} | columns) + "\n")


def run_settings(config: AsyncBench, mode: Mode, rows: Path) -> RlConfig:
    """Settings of the training run that is measured."""
    bench, rollout = config.bench, config.rollout
    has_agent = bench.workload == "environment"
    tokens = bench.response_tokens * (_LARGEST if bench.workload == "long_tail" else 1)
    train = config.train.model_dump(include={"seed", "timeout_s", "stop_grace_s"})
    train |= {"batch_size": rollout.batch_size * rollout.n_samples_per_prompt}
    settings: dict[str, Any] = {
        "actor": config.actor.model_dump(exclude_unset=True) | {"lr_scheduler": "constant"},
        "data": {"prompt_dataset": str(rows), "max_len": _MESSAGE_TOKENS},
        "rollout": rollout.model_dump(exclude_unset=True)
        | {
            "batch_size": rollout.batch_size,
            "n_samples_per_prompt": rollout.n_samples_per_prompt,
            "max_new_tokens": tokens,
        },
        "algo": {"advantage": {"is_correction_enable": True}},
        "vllm": config.vllm.model_dump(exclude_unset=True),
        "ds": config.ds.model_dump(exclude_unset=True),
        "ckpt": {"output_dir": str(rows.parent)},
    }
    if has_agent:
        context_len = _MESSAGE_TOKENS + bench.turns * (tokens + _MESSAGE_TOKENS)
        limits: dict[str, Any] = {"max_turns": bench.turns, "context_len": context_len}
        # An environment that waits for minutes does not hang.
        limits["step_limit_s"] = Agent().step_limit_s + bench.step_s
        limits["episode_limit_s"] = Agent().episode_limit_s + bench.turns * bench.step_s
        settings["agent"] = config.agent.model_dump(exclude_unset=True) | limits
        train["agent_func_path"] = _ENVIRONMENT
    else:
        settings["reward"] = {"remote_url": _REWARD}
    if mode.queue:
        train |= {"async_enable": True, "async_queue_size": mode.queue, "partial_rollout_enable": mode.partial}
    return RlConfig.model_validate(settings | {"train": train})


class _Times:
    """Records the times of steps, in place of a run's report."""

    def __init__(self) -> None:
        self._progress = Progress(console=Console(quiet=True))
        self.steps: list[Metrics] = []

    def begin(self) -> None:
        self._progress.begin(total_steps=0)
        self.steps = []

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._progress.phase(name)

    def step(self, step: int, metrics: Metrics) -> None:
        self.steps.append(metrics | self._progress.take_times())

    def say(self, line: object) -> None:
        sys.stderr.write(f"{line}\n")

    def generated(self, done: int, total: int) -> None:
        """Show nothing: only times are of interest."""


class _Loop:
    """The training loop on started roles, which begins anew with the first row in each run."""

    def __init__(self, processor: Processor, prompts: RemotePrompts, roles: Roles, *, on_gpu: bool) -> None:
        self._processor, self._prompts, self._roles, self._on_gpu = processor, prompts, roles, on_gpu
        self._start = prompts.state()
        self._times = _Times()
        self._done = 0
        """Steps of all runs before, which is also the version of the weights."""
        roles.weight_sync.sync(0)

    def run(self, config: RlConfig, mode: Mode, bench: Asynchrony) -> Metrics:
        """Make the steps of one mode; returns the averages of their metrics."""
        first, last = self._done + 1, self._done + steps_of(mode, bench)
        rollouts = make_rollouts(config, self._prompts, self._roles, self._times)
        rollouts.load_state(self._start)
        checks = make_checks(
            config, self._processor, None, self._roles, self._times, on_gpu=self._on_gpu, first_step=first
        )
        budget = PromptBudget(self._prompts.num_rows)
        self._times.begin()
        try:
            if isinstance(rollouts, Ahead):
                rollouts.begin(last_step=last, num_prompts=budget.total, version=self._done)
            train(
                config,
                rollouts=rollouts,
                rewarder=self._roles.reward_sources,
                policy=self._roles.policy,
                weight_sync=self._roles.weight_sync,
                reference=None,
                critic=None,
                report=self._times,
                check_responses=checks.check_responses,
                check_sync=checks.check_sync,
                after_step=lambda step, batch: {},
                save=lambda step, state: None,
                first_step=first,
                last_step=last,
                budget=budget,
                state=LoopState(config.algo.kl.init_coef),
            )
        finally:
            if isinstance(rollouts, Ahead):
                rollouts.close()
        self._done = last
        return averaged(self._times.steps, first=warm_up(bench.queue_sizes), queue=mode.queue)


@contextmanager
def _roles(config: RlConfig) -> Iterator[tuple[Session, _Loop]]:
    """Start the roles of a run."""
    report = _Times()
    processor = processor_of(
        config.actor.model_name_or_path, config.data, trust_remote_code=config.actor.trust_remote_code
    )
    with session() as machines, ExitStack() as stack:
        places = plan(**plan_arguments(config, machines))
        check_devices(config.vllm, machines, places)
        builder = RoleBuilder(machines.divided(places), places, stack)
        with builder.running():
            prompts = builder.prompts(config, report.say)
            roles = builder.roles(
                config,
                processor,
                adapter=None,
                critic_adapter=None,
                num_rows=prompts.num_rows,
                report=report,
                build_engine=None if config.has_agent else partial(_build_engine, engine_settings(config)),
            )
            if not machines.has_gpus:
                pin(engines=builder.groups["vllm"].pids, ranks=builder.groups["actor"].pids)
            yield machines, _Loop(processor, prompts, roles, on_gpu=machines.has_gpus)


def pin(*, engines: Sequence[int], ranks: Sequence[int]) -> None:
    """Let engines and trainer compute on half of the cores each, as if these were devices of their own.

    An engine has two processes, of which the second, vLLM's core, is known by its title only.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    half = len(cores) // 2
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError, psutil.Error):  # a process or thread may end meanwhile
            if process.pid in ranks:
                _restrict(process.pid, cores[half:])
            elif process.pid in engines or " ".join(process.cmdline()).startswith(_ENGINE_CORE):
                _restrict(process.pid, cores[:half])


def _restrict(pid: int, cores: Sequence[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def _build_engine(settings: EngineSettings) -> GivenLengthEngine:
    from vlmrl.commands.bench.given_lengths import GivenLengthEngine  # imports torch, in the engine's process only

    return GivenLengthEngine(settings)


def _print(config: AsyncBench, machines: Session, mode: Mode, number: int, averages: Metrics) -> None:
    prefix, end = "time/", "_s"
    seconds = {name[len(prefix) : -len(end)]: s for name, s in averages.items() if name.startswith(prefix)}
    print_json(
        **_fields(config, mode),
        round=number,
        seconds={name: round(seconds[name], 4) for name in sorted(seconds)},
        response_tokens=round(averages["response/tokens_mean"], 1),
        staleness=round(averages.get("async/staleness_mean", 0.0), 2),
        mixed=round(averages.get("async/mixed_fraction", 0.0), 3),
        device=f"{sum(machines.slots)} x {machines.unit}",
    )


def _fields(config: AsyncBench, mode: Mode) -> dict[str, Any]:
    bench = config.bench
    environment = {"step_s": bench.step_s, "turns": bench.turns} if bench.workload == "environment" else {}
    return {
        "bench": "async",
        "model": config.actor.model_name_or_path,
        "workload": bench.workload,
        **environment,
        "mode": mode.name,
        "queue": mode.queue,
    }


def _summarize(config: AsyncBench, rounds: Mapping[Mode, Sequence[Seconds]]) -> None:
    rows = []
    for mode, result in results(rounds).items():
        values = {name: round(value, 4) for name, value in result._asdict().items()}
        print_json(**_fields(config, mode), **values, reached=round(result.reached, 4))
        rows.append(
            (
                *(mode.name, str(mode.queue), f"{result.seconds_per_step:.3f}"),
                *(f"{result.speedup:.2f}", f"{result.bound:.2f}", f"{result.reached:.0%}"),
            )
        )
    print_table(("mode", "Q", "s/step", "speed-up", "bound", "reached"), rows)
