"""From answers and their scores to experience: reward shaping, advantages, and the numbers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlmrl.algorithms.advantages import FLAG, advantages
from vlmrl.algorithms.kl import kl_to_reference
from vlmrl.algorithms.shaping import shape, teaches
from vlmrl.config.run import RlConfig
from vlmrl.rewards.failures import count_failures
from vlmrl.system.user_function import name_or_function
from vlmrl.types import Experience, Floats, Group, Metrics, Sample, Score
from vlmrl.verify.logprobs import check_agreement, compare_engine


class Passes(NamedTuple):
    """What the models of a run say of a step's answers, before anything is learnt. Lists run over samples, [T] each."""

    samples: list[Sample]
    old: list[Floats] | None = None
    """Log-probs of the policy; None: its update finds them."""
    ref: list[Floats] | None = None
    """Log-probs of the reference; None without one."""
    values: list[Floats] | None = None
    """What the critic expects from each sampled token on; None without one."""


class Worth(NamedTuple):
    """What the responses of some groups are worth, [N, G] each."""

    rewards: Tensor
    """After shaping, without those of single tokens, which are not shaped."""
    step_rewards: Tensor
    """All that is paid at single tokens."""
    scored: Tensor
    """There is a reward: it takes part in baseline and loss."""


class Judged(NamedTuple):
    """A step's answers and what became of them; what a transcript is written from."""

    groups: list[Group]
    scores: list[list[Score]]
    rewards: list[Floats]
    """N arrays of [G], after shaping; NaN where there is none."""
    experience: Experience
    left_out: Sequence[tuple[Group, list[Score], Floats]] = ()
    """Groups that were drawn and are not trained on, with their scores and rewards."""


def judge(
    config: RlConfig,
    groups: list[Group],
    scores: list[list[Score]],
    passes: Passes,
    *,
    kl_coef: float,
    span: tuple[float, float] | None = None,
) -> tuple[Judged, Metrics]:
    """From scores to advantages, and the metrics of all that is known before learning.

    A response without a reward is in no baseline and in no loss; engine and trainer are compared on it all the same,
    where that takes a pass of its own. `span` is the experience's.

    `kl_coef` is the weight of the KL to the reference on this step. Without old log-probabilities the policy compares
    itself with the engine while it learns.

    Raises:
        SyncError: engine and trainer disagree on the log-probabilities of what was sampled.
        ConfigError: the user's own estimator did not give advantages.
    """
    algo = config.algo
    every = [score for group in scores for score in group]
    rewards, _, scored = worth(config, groups, scores)
    sampled = pad([sample.sampled for sample in passes.samples])
    gap = reference_gap(passes, sampled, estimator=algo.kl.estimator)
    found = advantages(
        rewards,
        sampled,
        estimator=name_or_function(algo.advantage.estimator, FLAG),
        gamma=algo.advantage.gamma,
        lambd=algo.advantage.lambd,
        no_std_norm=algo.advantage.no_std_norm,
        penalty=None if gap is None or algo.kl.use_loss else kl_coef * gap,
        token_rewards=token_rewards(every, passes.samples),
        values=None if passes.values is None else pad(passes.values),
        scored=scored,
    )
    experience = Experience(
        samples=[s if score.has_reward else s.left_out() for s, score in zip(passes.samples, every, strict=True)],
        advantages=unpad(found.advantages, passes.samples),
        old_logprobs=passes.old,
        rollout_logprobs=[rollout.logprobs for group in groups for rollout in group.rollouts],
        ref_logprobs=passes.ref if algo.kl.use_loss else None,
        values=passes.values,
        returns=None if found.returns is None else unpad(found.returns, passes.samples),
        kl_coef=kl_coef if algo.kl.use_loss else 0.0,
        span=span,
    )
    metrics: Metrics = {"batch/tokens": float(sum(len(sample.tokens) for sample in passes.samples))}
    if gap is not None:
        metrics |= {"kl/reference": float(gap[sampled].mean()), "kl/coef": kl_coef}
    if passes.values is not None:
        metrics["value/mean"] = float(pad(passes.values)[sampled].mean())
    if passes.old is not None:
        agreement = compare_engine(replace(experience, samples=passes.samples), passes.old)
        check_agreement(config, agreement)
        metrics |= agreement
    shown = list(rewards.masked_fill(~scored, torch.nan).numpy())
    return Judged(groups=groups, scores=scores, rewards=shown, experience=experience), metrics


def worth(config: RlConfig, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> Worth:
    """The rewards of all responses as a baseline meets them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    every = [score for group in scores for score in group]
    paid = [0.0 if score.token_rewards is None else float(score.token_rewards.sum()) for score in every]
    rewards = shape(
        torch.tensor([score.total for score in every], dtype=torch.float32),
        num_sampled=torch.tensor([rollout.num_sampled for rollout in rollouts]),
        is_truncated=torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]),
        max_new_tokens=config.rollout.max_new_tokens,
        overlong_buffer=config.reward.overlong_buffer_len,
        overlong_factor=config.reward.overlong_penalty_factor,
        truncated_coefficient=config.reward.stop_properly_penalty_coef,
        clip_range=config.reward.clip_range,
    )
    shape_of_groups = (len(groups), -1)
    return Worth(
        rewards.reshape(shape_of_groups),
        torch.tensor(paid).reshape(shape_of_groups),
        torch.tensor([score.has_reward for score in every]).reshape(shape_of_groups),
    )


def token_rewards(scores: Sequence[Score], samples: Sequence[Sample]) -> Tensor | None:
    """What is paid at single tokens, [B, T]; None when nothing is."""
    if all(score.token_rewards is None for score in scores):
        return None
    blank = [np.zeros(len(sample.tokens), dtype=np.float32) for sample in samples]
    return pad([row if s.token_rewards is None else s.token_rewards for s, row in zip(scores, blank, strict=True)])


def numbers(groups: Sequence[Group], scores: Sequence[Sequence[Score]], values: Worth) -> Metrics:
    """What the responses of these groups and their rewards look like; rewards are over those that have one.

    Rewards of single tokens count in `reward/*`, and are not shaped.
    """
    every = [score for group in scores for score in group]
    metrics = lengths_of(groups) | count_failures(every)
    earned = [score.earned for score in every if score.has_reward]
    if earned:
        totals = (values.rewards + values.step_rewards)[values.scored]
        metrics |= {
            "reward/mean": float(np.mean(earned)),
            "reward/std": float(np.std(earned)),
            "reward/shaped_mean": float(totals.mean()),
        }
    teaching = teaches(values.rewards, step_rewards=values.step_rewards, scored=values.scored)
    metrics["group/constant_fraction"] = float((~teaching).float().mean())
    for name in sorted({name for score in every for name in score.parts}):
        metrics[f"reward/parts/{name}"] = float(np.mean([s.parts[name] for s in every if name in s.parts]))
    return metrics


def lengths_of(groups: Sequence[Group]) -> Metrics:
    """How long responses are, in sampled tokens, and how many were cut off."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([rollout.num_sampled for rollout in rollouts])
    return {
        "response/tokens_mean": float(lengths.mean()),
        "response/tokens_max": float(lengths.max()),
        "response/truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
    }


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
