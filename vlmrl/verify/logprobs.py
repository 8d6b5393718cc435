"""Check that engine and trainer hold the same version of the weights and compute the same log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlmrl.config.verbs import RlConfig
from vlmrl.data.experience import Experience
from vlmrl.errors import SyncError
from vlmrl.types import Bools, Floats, Group, Metrics, Rollout

AGREEMENT = ("sync/logprob_diff_max", "sync/logprob_diff_mean", "sync/kl_rollout_train")
"""Metrics of the differences between log-probs of engine and trainer."""


def check_versions(groups: Sequence[Group], *, version: int, max_age: int = 0) -> None:
    """Check that every response was sampled from the newest weights, or from at most `max_age` versions before.

    Raises:
        SyncError: one was not.
    """
    allowed = set(range(version - max_age, version + 1))
    for group in groups:
        stale = {held for rollout in group.rollouts for held in rollout.versions} - allowed
        if stale:
            bound = f", and train.async_queue_size allows {max_age} before" if max_age else ""
            raise SyncError(
                f"a response to {group.prompt.source} comes from weights of version {sorted(stale)[0]}, the trainer is "
                f"at version {version}{bound}: an engine missed a weight sync, restart the run with --ckpt.load_enable"
            )


def compare_engine(experience: Experience, old: Sequence[Floats]) -> Metrics:
    """Difference between the log-probs of engine and trainer, on the sampled tokens.

    The KL is the k3 estimate of KL(engine || trainer), over the engine's own samples. When the update computes the old
    log-probs (`RlConfig.needs_one_pass`), `learning/policy.py` computes the same metrics.
    """
    return _differences([sample.sampled for sample in experience.samples], experience.rollout_logprobs, old)


def with_logprobs(groups: Sequence[Group], logprobs: Sequence[Floats]) -> list[Group]:
    """Return the groups with these log-probs, [T] per segment, in place of those that were recorded in sampling."""
    rows = iter(logprobs)

    def with_rows(rollout: Rollout) -> Rollout:
        return replace(rollout, segments=tuple(replace(segment, logprobs=next(rows)) for segment in rollout.segments))

    return [replace(group, rollouts=tuple(map(with_rows, group.rollouts))) for group in groups]


def check_groups(config: RlConfig, groups: Sequence[Group], logprobs: Sequence[Floats]) -> Metrics:
    """Compare the engine's log-probs of these groups with the trainer's, [T] per segment: metrics of `compare_engine`.

    Raises:
        SyncError: as `check_agreement`.
    """
    segments = [segment for group in groups for segment in group.segments]
    sampled, engine = [segment.sampled for segment in segments], [segment.logprobs for segment in segments]
    agreement = _differences(sampled, engine, logprobs)
    check_agreement(config, agreement)
    return agreement


def _differences(sampled: Sequence[Bools], engine: Sequence[Floats], trainer: Sequence[Floats]) -> Metrics:
    """Metrics of the differences of log-probs on the sampled tokens."""
    flags = np.concatenate(sampled)
    difference = (np.concatenate(trainer) - np.concatenate(engine))[flags].astype(np.float64)
    values = (
        float(np.abs(difference).max(initial=0.0)),
        float(np.abs(difference).mean()) if difference.size else 0.0,
        float(np.mean(np.expm1(difference) - difference)) if difference.size else 0.0,
    )
    return dict(zip(AGREEMENT, values, strict=True))


def largest_gap(config: RlConfig) -> float:
    """Return the bound on the mean difference between log-probs of engine and trainer over the sampled tokens.

    Infinity if the settings make them compute differently, and set no bound.
    """
    return config.vllm.logprob_diff_limit(param_dtype=config.ds.param_dtype, load_in_4bit=config.ds.load_in_4bit)


def rounding(config: RlConfig) -> float:
    """Return the mean difference of log-probs that rounding may cause between correct implementations of one model.

    In fp32 it is 1e-6, in bf16 a quarter of the bound.
    """
    return 1e-6 if config.ds.param_dtype == "fp32" else 0.25 * min(largest_gap(config), 0.1)


def noise_floor(config: RlConfig, *, on_gpu: bool) -> float:
    """Return the smallest mean effect of rounding on a log-prob to assume: no difference below it counts as a fault."""
    if config.ds.param_dtype == "bf16":
        return 1e-3
    # On GPUs vLLM's attention multiplies fp32 in TF32, which has ten bits.
    return 1e-4 if on_gpu else 2e-6


def are_alike(config: RlConfig) -> bool:
    """Whether engine and trainer are expected to compute the same."""
    if config.vllm.quantization != "none":
        return False
    return not (config.ds.load_in_4bit and config.vllm.qlora_base == "original")


def check_agreement(config: RlConfig, agreement: Metrics) -> None:
    """Check the metrics of `compare_engine` against the bound.

    Raises:
        SyncError: the mean difference of log-probabilities is above `vllm.max_logprob_diff`.
    """
    bound = largest_gap(config)
    gap = agreement["sync/logprob_diff_mean"]
    if not gap <= bound:
        raise SyncError(
            f"engine and trainer disagree: their log-probs of the sampled tokens differ by {gap:.2g} on average "
            f"(at most {agreement['sync/logprob_diff_max']:.2g}), the bound is {bound:g}: the responses were not "
            "sampled from the model that is trained; look for different pixels, tokens or precision on one side, or "
            "raise --vllm.max_logprob_diff"
        )
