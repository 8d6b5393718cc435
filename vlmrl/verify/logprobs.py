"""Engine and trainer are one function and one version, or the run stops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vlmrl.config.run import RlConfig
from vlmrl.errors import SyncError
from vlmrl.types import Experience, Floats, Group, Metrics


def check_versions(groups: Sequence[Group], *, version: int) -> None:
    """In synchronous training every answer comes from the newest weights.

    Raises:
        SyncError: one does not.
    """
    for group in groups:
        stale = {rollout.version for rollout in group.rollouts} - {version}
        if stale:
            raise SyncError(
                f"an answer to {group.prompt.source} was made by weights of version {sorted(stale)[0]}, the trainer is "
                f"at version {version}: an engine missed a publish, restart the run with --ckpt.load_enable"
            )


def compare_engine(experience: Experience, old: Sequence[Floats]) -> Metrics:
    """How far the engine's log-probabilities are from the trainer's, on the tokens that were sampled.

    The KL is the k3 estimate of KL(engine || trainer), over the engine's own samples.
    """
    sampled = np.concatenate([sample.sampled for sample in experience.samples])
    difference = (np.concatenate(old) - np.concatenate(experience.rollout_logprobs))[sampled]
    difference = difference.astype(np.float64)
    return {
        "sync/logprob_diff_max": float(np.abs(difference).max(initial=0.0)),
        "sync/logprob_diff_mean": float(np.abs(difference).mean()) if difference.size else 0.0,
        "sync/kl_rollout_train": float(np.mean(np.expm1(difference) - difference)) if difference.size else 0.0,
    }


def largest_gap(config: RlConfig) -> float:
    """How far apart the log-probabilities of engine and trainer may be, on average over the sampled tokens.

    Infinity where they are not the same function by the user's own choice, and nobody named a bound.
    """
    if not are_alike(config):
        return config.vllm.max_logprob_diff or math.inf
    return config.vllm.max_logprob_diff or (1e-3 if config.ds.param_dtype == "fp32" else 0.1)


def rounding(config: RlConfig) -> float:
    """What rounding alone may make of the mean difference between two sound implementations of one model: in fp32 a
    millionth, in bf16 a quarter of the bound."""
    return 1e-6 if config.ds.param_dtype == "fp32" else 0.25 * min(largest_gap(config), 0.1)


def noise_floor(config: RlConfig, *, on_gpu: bool) -> float:
    """What rounding does at least to a log-prob, on average: below it nothing is taken for a fault."""
    if config.ds.param_dtype == "bf16":
        return 1e-3
    # On GPUs vLLM's attention multiplies fp32 in TF32, which has ten bits.
    return 1e-4 if on_gpu else 2e-6


def are_alike(config: RlConfig) -> bool:
    """Engine and trainer are meant to be the same function."""
    return not (config.ds.load_in_4bit and config.vllm.qlora_base == "original")


def check_agreement(config: RlConfig, agreement: Metrics) -> None:
    """Stop when engine and trainer are not the same function.

    Raises:
        SyncError: the mean difference of log-probabilities is above `vllm.max_logprob_diff`.
    """
    bound = largest_gap(config)
    gap = agreement["sync/logprob_diff_mean"]
    if not gap <= bound:
        raise SyncError(
            f"engine and trainer disagree: their log-probs of the sampled tokens differ by {gap:.2g} on average "
            f"(at most {agreement['sync/logprob_diff_max']:.2g}), the bound is {bound:g}: the answers were not sampled "
            "from the model that is trained; look for other pixels, tokens or precision on one side, or raise "
            "--vllm.max_logprob_diff"
        )
