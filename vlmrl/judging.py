"""From answers and their scores to experience: reward shaping, advantages, and the numbers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlmrl.agreement import check_agreement, compare_engine
from vlmrl.algorithms.advantages import FLAG, advantages, is_constant
from vlmrl.algorithms.kl import kl_to_reference
from vlmrl.algorithms.shaping import shape
from vlmrl.config.run import RlConfig
from vlmrl.plugins import name_or_function
from vlmrl.types import Experience, Floats, Group, Metrics, Sample, Score


class Passes(NamedTuple):
    """What the models of a run say of a step's answers, before anything is learnt. Lists run over samples, [T] each."""

    samples: list[Sample]
    old: list[Floats] | None = None
    """Log-probs of the policy; None: its update finds them."""
    ref: list[Floats] | None = None
    """Log-probs of the reference; None without one."""
    values: list[Floats] | None = None
    """What the critic expects from each sampled token on; None without one."""


class Judged(NamedTuple):
    """A step's answers and what became of them; what a transcript is written from."""

    groups: list[Group]
    scores: list[list[Score]]
    rewards: list[Floats]
    """N arrays of [G], after shaping."""
    experience: Experience


def judge(
    config: RlConfig, groups: list[Group], scores: list[list[Score]], passes: Passes, *, kl_coef: float
) -> tuple[Judged, Metrics]:
    """From scores to advantages, and the metrics of all that is known before learning.

    `kl_coef` is the weight of the KL to the reference on this step. Without old log-probabilities the policy compares
    itself with the engine while it learns.

    Raises:
        SyncError: engine and trainer disagree on the log-probabilities of what was sampled.
        ConfigError: the user's own estimator did not give advantages.
    """
    algo = config.algo
    every = [score for group in scores for score in group]
    by_group = shaped(config, groups, every).reshape(len(groups), -1)
    sampled = pad([sample.sampled for sample in passes.samples])
    gap = reference_gap(passes, sampled, estimator=algo.kl.estimator)
    found = advantages(
        by_group,
        sampled,
        estimator=name_or_function(algo.advantage.estimator, FLAG),
        gamma=algo.advantage.gamma,
        lambd=algo.advantage.lambd,
        no_std_norm=algo.advantage.no_std_norm,
        penalty=None if gap is None or algo.kl.use_loss else kl_coef * gap,
        token_rewards=token_rewards(every, passes.samples),
        values=None if passes.values is None else pad(passes.values),
    )
    experience = Experience(
        samples=passes.samples,
        advantages=unpad(found.advantages, passes.samples),
        old_logprobs=passes.old,
        rollout_logprobs=[rollout.logprobs for group in groups for rollout in group.rollouts],
        ref_logprobs=passes.ref if algo.kl.use_loss else None,
        values=passes.values,
        returns=None if found.returns is None else unpad(found.returns, passes.samples),
        kl_coef=kl_coef if algo.kl.use_loss else 0.0,
    )
    metrics = numbers(groups, every, by_group)
    if gap is not None:
        metrics |= {"kl/reference": float(gap[sampled].mean()), "kl/coef": kl_coef}
    if passes.values is not None:
        metrics["value/mean"] = float(pad(passes.values)[sampled].mean())
    if passes.old is not None:
        agreement = compare_engine(experience, passes.old)
        check_agreement(config, agreement)
        metrics |= agreement
    return Judged(groups=groups, scores=scores, rewards=list(by_group.numpy()), experience=experience), metrics


def shaped(config: RlConfig, groups: Sequence[Group], scores: Sequence[Score]) -> Tensor:
    """The rewards of all answers, [B], as a baseline meets them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return shape(
        torch.tensor([score.total for score in scores], dtype=torch.float32),
        num_sampled=torch.tensor([rollout.num_sampled for rollout in rollouts]),
        is_truncated=torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]),
        max_new_tokens=config.rollout.max_new_tokens,
        overlong_buffer=config.reward.overlong_buffer_len,
        overlong_factor=config.reward.overlong_penalty_factor,
        truncated_coefficient=config.reward.stop_properly_penalty_coef,
        clip_range=config.reward.clip_range,
    )


def token_rewards(scores: Sequence[Score], samples: Sequence[Sample]) -> Tensor | None:
    """What is paid at single tokens, [B, T]; None when nothing is."""
    if all(score.token_rewards is None for score in scores):
        return None
    blank = [np.zeros(len(sample.tokens), dtype=np.float32) for sample in samples]
    return pad([row if s.token_rewards is None else s.token_rewards for s, row in zip(scores, blank, strict=True)])


def numbers(groups: Sequence[Group], scores: Sequence[Score], rewards: Tensor) -> Metrics:
    """What a step's answers and their rewards, shaped [N, G], look like. Rewards of single tokens are not shaped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    raw = np.array([score.earned for score in scores], dtype=np.float32)
    paid = torch.tensor([0.0 if s.token_rewards is None else float(s.token_rewards.sum()) for s in scores])
    lengths = np.array([rollout.num_sampled for rollout in rollouts])
    metrics = {
        "batch/tokens": float(sum(len(rollout.tokens) for rollout in rollouts)),
        "reward/mean": float(raw.mean()),
        "reward/std": float(raw.std()),
        "reward/shaped_mean": float(rewards.mean() + paid.mean()),
        "group/constant_fraction": float((is_constant(rewards) & is_constant(paid.view_as(rewards))).float().mean()),
        "response/tokens_mean": float(lengths.mean()),
        "response/tokens_max": float(lengths.max()),
        "response/truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
    }
    for name in sorted({name for score in scores for name in score.parts}):
        metrics[f"reward/parts/{name}"] = float(np.mean([s.parts[name] for s in scores if name in s.parts]))
    return metrics


def reference_gap(passes: Passes, sampled: Tensor, *, estimator: str) -> Tensor | None:
    """[B, T] of the KL estimate between policy and reference, 0 where not sampled; None without one of the two."""
    if passes.old is None or passes.ref is None:
        return None
    gap = kl_to_reference(pad(passes.old), pad(passes.ref), estimator=estimator)  # type: ignore[arg-type]
    return torch.where(sampled, gap, 0.0)


def pad(rows: Sequence[np.ndarray]) -> Tensor:
    """[B, T] from B rows of different lengths, filled up with zeros."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def unpad(rows: Tensor, samples: Sequence[Sample]) -> list[Floats]:
    """B arrays of [T] from [B, T]."""
    return [row[: len(sample.tokens)].numpy() for row, sample in zip(rows.float(), samples, strict=True)]
