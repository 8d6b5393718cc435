"""The number of steps and of optimizer steps of a run, and its progress."""

from __future__ import annotations

from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError


def check_steps(config: TrainingConfig, num_rows: int) -> int:
    """`last_step`, after checking that the actor is trained before it.

    Raises:
        ConfigError: the data do not fill one step, or only the critic would be trained.
    """
    frozen = max(0, config.critic.freezing_steps) if isinstance(config, RlConfig) and config.has_critic else 0
    optimizer_steps(config, num_rows, frozen=frozen)
    return last_step(config, num_rows)


def optimizer_steps(config: TrainingConfig, num_rows: int, *, frozen: int = 0) -> int:
    """Return the number of optimizer steps of the whole run, the length of the learning rate's schedule.

    The first `frozen` steps of the run take none.

    Raises:
        ConfigError: the run has no more than `frozen` steps.
    """
    steps = last_step(config, num_rows)
    if not isinstance(config, RlConfig):
        return steps
    if frozen >= steps:
        raise ConfigError(f"critic.freezing_steps {frozen} leaves the actor none of the run's {steps} steps: lower it")
    steps -= frozen
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return steps * config.train.max_epochs * -(-samples // config.train.batch_size)


def last_step(config: TrainingConfig, num_rows: int) -> int:
    """Steps of the whole run.

    Raises:
        ConfigError: the data do not fill one step.
    """
    size, passes, flag = _batches(config)
    steps = num_rows * passes // size
    if steps == 0:
        raise ConfigError(f"{num_rows} rows, {passes} times over, do not fill one batch of {size}: lower {flag}")
    return min(steps, config.train.max_steps or steps)


def last_step_from(config: TrainingConfig, num_rows: int, *, done: int, drawn: int) -> int:
    """`last_step` of a run resumed after `done` steps and `drawn` rows, whose batches may have had another size.

    With dynamic filtering, where a step draws as many rows as it needs, this is an upper bound.
    """
    size, passes, _ = _batches(config)
    steps = done + max(num_rows * passes - drawn, 0) // size
    if isinstance(config, RlConfig) and config.algo.dynamic_filtering_enable:
        steps = max(steps, num_rows * passes // size)
    return min(steps, config.train.max_steps or steps)


def fraction_done(config: TrainingConfig, num_rows: int, *, done: int, drawn: int) -> float:
    """Progress after `done` steps and `drawn` rows, from 0 to 1: by rows or by `train.max_steps`, whichever ends the
    run."""
    by_steps = done / config.train.max_steps if config.train.max_steps else 0.0
    return min(max(drawn / (num_rows * _batches(config)[1]), by_steps), 1.0)


def _batches(config: TrainingConfig) -> tuple[int, int, str]:
    """Rows per step, passes over all rows, and the flag of the rows per step."""
    if isinstance(config, RlConfig):
        return config.rollout.batch_size, config.train.num_episodes, "--rollout.batch_size"
    return config.train.batch_size, config.train.max_epochs, "--train.batch_size"
