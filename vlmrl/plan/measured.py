"""Measured runs, to which rates are fitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError
from vlmrl.models.configured import ConfiguredModels
from vlmrl.plan.fit import Measured
from vlmrl.plan.planner import costs_of
from vlmrl.plan.step import step_of
from vlmrl.plan.workload import Workload, response_lengths

PHASES = ("rollout", "logprob", "value", "update", "sync")
"""Phases that a run measures by themselves; what remains of `time/step_s` is the phase `other`."""


def step_seconds(
    records: Sequence[Mapping[str, Any]], typical: Callable[[Iterable[float]], float] = median
) -> dict[str, float]:
    """Return the seconds of each phase, and of the whole step, over the steps after the first, in which checks run.

    `typical` is the median, or the minimum on a machine with other work.

    Raises ConfigError when there is no such step.
    """
    steps = [record for record in records if "time/step_s" in record and record.get("step", 0) > 1]
    if not steps:
        raise ConfigError("plan.runs: a run needs at least two steps, for the first one has further checks")
    seconds = {phase: typical(float(step.get(f"time/{phase}_s", 0.0)) for step in steps) for phase in PHASES}
    seconds = {phase: value for phase, value in seconds.items() if value}
    others = (float(s["time/step_s"]) - sum(float(s.get(f"time/{p}_s", 0.0)) for p in PHASES) for s in steps)
    return seconds | {"other": max(0.0, typical(others)), "step": typical(float(s["time/step_s"]) for s in steps)}


def measured_workload(config: RlConfig, records: Sequence[Mapping[str, Any]], *, patches: float = 0.0) -> Workload:
    """Return the workload of a run's steps: numbers of its settings, lengths of its metrics.

    `patches` are those of a prompt's images, which no metric has.
    """
    steps = [record for record in records if "response/tokens_mean" in record and record.get("step", 0) > 1]
    mean = median(float(step["response/tokens_mean"]) for step in steps)
    longest = median(float(step["response/tokens_max"]) for step in steps)
    count = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    prompt = median(float(step["batch/tokens"]) for step in steps) / count - mean
    lengths = response_lengths(count, mean=mean, longest=longest, sigma=0.8)
    return Workload(config.rollout.batch_size, config.rollout.n_samples_per_prompt, prompt, lengths, patches)


def measured_run(
    config: RlConfig,
    records: Sequence[Mapping[str, Any]],
    models: ConfiguredModels,
    *,
    cache_bytes: float,
    device: str,
    patches: float = 0.0,
    typical: Callable[[Iterable[float]], float] = median,
) -> Measured:
    """Return what the steps of a run compute, and the seconds that they took.

    Args:
        cache_bytes: KV cache on each GPU of an engine.
        device: cpu or cuda.
        patches: of a prompt's images together.
        typical: see `step_seconds`.
    """
    seconds = step_seconds(records, typical)
    critic = costs_of(config, models, is_critic=True) if config.has_critic else None
    step = step_of(
        config,
        costs_of(config, models),
        measured_workload(config, records, patches=patches),
        cache_bytes=cache_bytes,
        device=device,
        critic=critic,
    )
    return Measured(step, seconds)
