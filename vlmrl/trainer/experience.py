"""Turn the responses and scores of a step into experience: reward shaping, advantages and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlmrl.algorithms.advantages import FLAG, advantages
from vlmrl.algorithms.distillation import limited, teacher_gap
from vlmrl.algorithms.kl import kl_to_reference
from vlmrl.algorithms.shaping import shape, shape_turns
from vlmrl.algorithms.signal import has_signal
from vlmrl.config.verbs import RlConfig
from vlmrl.data.experience import Experience
from vlmrl.data.responses import EndToEnd
from vlmrl.rewards.failures import count_failures
from vlmrl.system.user_function import name_or_function
from vlmrl.trainer.episodes import responses_of
from vlmrl.types import Floats, Group, Metrics, Rollout, Sample, Score
from vlmrl.verify.logprobs import check_agreement, compare_engine


class ModelOutputs(NamedTuple):
    """Outputs of the run's models on the responses of a step, before the update. Lists run over samples, [T] each."""

    samples: list[Sample]
    old: list[Floats] | None = None
    """Log-probs by the policy; None: the update computes them."""
    ref: list[Floats] | None = None
    """Log-probs by the reference; None without a reference."""
    values: list[Floats] | None = None
    """The critic's value estimates; None without a critic."""
    teacher: list[Floats] | None = None
    """Log-probs by the teacher, NaN on tokens that it does not have; None without a teacher."""


class ShapedRewards(NamedTuple):
    """Rewards of some groups' responses after shaping, [N, G] each."""

    rewards: Tensor
    """Without token rewards."""
    token_sums: Tensor
    """The sum of each response's token rewards."""
    has_reward: Tensor
    """False for responses without a reward, which take no part in baseline and loss."""
    token_rewards: Sequence[Floats | None]
    """N * G arrays of [T] over the segments of a response; None for one without token rewards."""

    @property
    def totals(self) -> Tensor:
        """[N, G] with token rewards."""
        return self.rewards + self.token_sums


class ScoredBatch(NamedTuple):
    """The responses of a step with their scores, rewards and experience, as transcripts show them."""

    groups: list[Group]
    scores: list[list[Score]]
    rewards: list[Floats]
    """N arrays of [G], after shaping; NaN for a response without a reward."""
    experience: Experience
    teacher_gaps: Sequence[Floats] | None = None
    """B arrays of [T]: log-prob of the teacher minus the policy's, 0 where not sampled; None without a teacher."""
    ref_logprobs: Sequence[Floats] | None = None
    """B arrays of [T]: by the reference, whether its KL is in the loss or in the rewards; None without a reference."""
    left_out: Sequence[tuple[Group, list[Score], Floats]] = ()
    """Groups that dynamic filtering rejected, with their scores and rewards."""


def make_experience(
    config: RlConfig,
    groups: list[Group],
    scores: list[list[Score]],
    outputs: ModelOutputs,
    *,
    kl_coef: float,
    span: tuple[float, float] | None = None,
) -> tuple[ScoredBatch, Metrics]:
    """Compute advantages from scores, and the metrics that are known before the update.

    A response without a reward enters neither baseline nor loss. Engine and trainer are compared on it all the same
    when `outputs.old` is given; when it is None, the update makes that comparison. In an asynchronous run neither does.

    Args:
        kl_coef: weight of the KL to the reference in this step.
        span: see `Experience.span`.

    Raises:
        SyncError: engine and trainer disagree on the log-probs of the sampled tokens.
        ConfigError: the user's own estimator did not return advantages.
    """
    algo = config.algo
    shaped = shaped_rewards(config, groups, scores)
    responses = EndToEnd(outputs.samples)
    rows = [sample.sampled for sample in outputs.samples]
    sampled = pad(responses.join(rows))
    values = None if outputs.values is None else pad(responses.join(outputs.values))
    kl = reference_kl(outputs, responses, sampled, estimator=algo.kl.estimator)
    estimate = advantages(
        shaped.rewards,
        sampled,
        estimator=name_or_function(algo.advantage.estimator, FLAG),
        gamma=algo.advantage.gamma,
        lambd=algo.advantage.lambd,
        no_std_norm=algo.advantage.no_std_norm,
        kl_penalty=None if kl is None or algo.kl.use_loss else kl_coef * kl,
        token_rewards=pad_token_rewards(shaped.token_rewards, responses.join(rows)),
        values=values,
        scored=shaped.has_reward,
    )
    gap = teacher_gaps(outputs, responses, sampled)
    term = None if gap is None else algo.distill.coef * limited(gap, algo.distill.max_gap)
    token_advantages = estimate.advantages if term is None else estimate.advantages + term
    segment_scores = [
        score
        for group, group_scores in zip(groups, scores, strict=True)
        for rollout, score in zip(group.rollouts, group_scores, strict=True)
        for _ in rollout.segments
    ]
    experience = Experience(
        samples=[
            sample if score.has_reward else sample.left_out()
            for sample, score in zip(outputs.samples, segment_scores, strict=True)
        ],
        advantages=responses.split(token_advantages.numpy()),
        old_logprobs=outputs.old,
        rollout_logprobs=[segment.logprobs for group in groups for segment in group.segments],
        ref_logprobs=outputs.ref if algo.kl.use_loss else None,
        values=outputs.values,
        returns=None if estimate.returns is None else responses.split(estimate.returns.numpy()),
        kl_coef=kl_coef if algo.kl.use_loss else 0.0,
        span=span,
    )
    metrics: Metrics = {"batch/tokens": float(sum(len(sample.tokens) for sample in outputs.samples))}
    if kl is not None:
        metrics |= {"kl/reference": float(kl[sampled].mean()), "kl/coef": kl_coef}
    if gap is not None and term is not None and sampled.any():
        size = float(term[sampled].abs().mean())
        metrics |= {"distill/kl": -float(gap[sampled].mean()), "distill/advantage_size": size}
    if values is not None:
        metrics["value/mean"] = float(values[sampled].mean())
    if outputs.old is not None and config.train.queue_size == 0:
        agreement = compare_engine(replace(experience, samples=outputs.samples), outputs.old)
        check_agreement(config, agreement)
        metrics |= agreement
    rewards = list(shaped.rewards.masked_fill(~shaped.has_reward, torch.nan).numpy())
    gaps = None if gap is None else responses.split(gap.numpy())
    return ScoredBatch(groups, scores, rewards, experience, gaps, outputs.ref), metrics


def shaped_rewards(config: RlConfig, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> ShapedRewards:
    """Shape the rewards of all responses, as advantage estimators take them.

    Rewards of an environment's turns are token rewards for estimators that discount, and added up for others.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    all_scores = [score for group in scores for score in group]
    turns = [_turn_rewards(config, rollout, score) for rollout, score in zip(rollouts, all_scores, strict=True)]
    by_token = [score.token_rewards for score in all_scores]
    if config.algo.advantage.rewards_turns:
        by_token = [_at_turn_ends(*row) for row in zip(by_token, turns, rollouts, strict=True)]
        turns = [np.zeros(0, np.float32)] * len(rollouts)
    token_sums = [0.0 if row is None else float(row.sum()) for row in by_token]
    rewards = shape(
        torch.tensor([score.total for score in all_scores], dtype=torch.float32),
        num_sampled=torch.tensor([rollout.num_sampled for rollout in rollouts]),
        is_truncated=torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]),
        max_tokens=config.max_response_tokens,
        overlong_buffer=config.reward.overlong_buffer_len,
        overlong_factor=config.reward.overlong_penalty_factor,
        truncated_coefficient=config.reward.stop_properly_penalty_coef,
        clip_range=config.reward.clip_range,
    )
    rewards += torch.tensor([float(row.sum()) for row in turns])
    by_group = (len(groups), -1)
    return ShapedRewards(
        rewards.reshape(by_group),
        torch.tensor(token_sums).reshape(by_group),
        torch.tensor([score.has_reward for score in all_scores]).reshape(by_group),
        by_token,
    )


def _turn_rewards(config: RlConfig, rollout: Rollout, score: Score) -> Floats:
    """Return the rewards of a conversation's turns after shaping; none for other responses."""
    shaped = shape_turns(
        torch.tensor(score.turn_rewards, dtype=torch.float32),
        is_truncated=rollout.finish_reason == "length",
        truncated_coefficient=config.reward.stop_properly_penalty_coef,
    )
    return np.asarray(shaped.numpy())


def _at_turn_ends(token_rewards: Floats | None, turn_rewards: Floats, rollout: Rollout) -> Floats | None:
    """Add rewards of turns to those of tokens, [T] over all segments: each counts for the last token of its turn."""
    if not len(turn_rewards):
        return token_rewards
    rewards = [np.zeros(len(segment.tokens), dtype=np.float32) for segment in rollout.segments]
    remaining = iter(turn_rewards)
    for row, segment in zip(rewards, rollout.segments, strict=True):
        for turn in segment.turns:
            row[turn.end - 1] = next(remaining)
    joined = np.concatenate(rewards)
    return joined if token_rewards is None else token_rewards + joined


def pad_token_rewards(token_rewards: Sequence[Floats | None], rows: Sequence[np.ndarray]) -> Tensor | None:
    """Rewards of single tokens, [B, T]; None when no response has any. `rows` holds one row per response."""
    if all(row is None for row in token_rewards):
        return None
    zeros = [np.zeros(len(row), dtype=np.float32) for row in rows]
    return pad([zero if row is None else row for row, zero in zip(token_rewards, zeros, strict=True)])


def batch_metrics(groups: Sequence[Group], scores: Sequence[Sequence[Score]], shaped: ShapedRewards) -> Metrics:
    """Metrics of rewards, failures and lengths. Rewards are averaged over the responses that have one.

    Rewards of tokens and turns count in `reward/*`.
    """
    all_scores = [score for group in scores for score in group]
    metrics = length_metrics(groups) | count_failures(all_scores)
    earned = [score.earned for score in all_scores if score.has_reward]
    if earned:
        metrics |= {
            "reward/mean": float(np.mean(earned)),
            "reward/std": float(np.std(earned)),
            "reward/shaped_mean": float(shaped.totals[shaped.has_reward].mean()),
        }
    with_signal = has_signal(shaped.rewards, step_rewards=shaped.token_sums, scored=shaped.has_reward)
    metrics["group/constant_fraction"] = float((~with_signal).float().mean())
    for name in sorted({name for score in all_scores for name in score.parts}):
        metrics[f"reward/parts/{name}"] = float(np.mean([s.parts[name] for s in all_scores if name in s.parts]))
    return metrics


def length_metrics(groups: Sequence[Group]) -> Metrics:
    """Response lengths in sampled tokens, and the share of responses that were truncated; {} without responses."""
    rollouts = responses_of(groups)
    if not rollouts:
        return {}
    lengths = np.array([rollout.num_sampled for rollout in rollouts])
    return {
        "response/tokens_mean": float(lengths.mean()),
        "response/tokens_max": float(lengths.max()),
        "response/truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
    }


def reference_kl(outputs: ModelOutputs, responses: EndToEnd, sampled: Tensor, *, estimator: str) -> Tensor | None:
    """Estimate the KL between policy and reference, [B, T], 0 where not sampled; None without log-probs of both."""
    if outputs.old is None or outputs.ref is None:
        return None
    old, ref = pad(responses.join(outputs.old)), pad(responses.join(outputs.ref))
    kl = kl_to_reference(old, ref, estimator=estimator)  # type: ignore[arg-type]
    return torch.where(sampled, kl, 0.0)


def teacher_gaps(outputs: ModelOutputs, responses: EndToEnd, sampled: Tensor) -> Tensor | None:
    """Log-probs of the teacher minus those of the policy, [B, T], 0 where not sampled; None without a teacher."""
    if outputs.teacher is None:
        return None
    assert outputs.old is not None, "a teacher is compared with the log-probs before the update"
    return teacher_gap(pad(responses.join(outputs.old)), pad(responses.join(outputs.teacher)), sampled)


def pad(rows: Sequence[np.ndarray]) -> Tensor:
    """Stack B rows of different lengths into [B, T], padded with zeros."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
