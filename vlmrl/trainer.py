"""The loop, over Protocols: no Ray, DeepSpeed or vLLM in it.

Asynchrony is another Engine, an algorithm is another estimator or loss; neither is another loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vlmrl.algorithms.advantages import advantages, is_constant
from vlmrl.algorithms.kl import kl_to_reference
from vlmrl.algorithms.shaping import shape
from vlmrl.config.adapter_checks import is_one_pass
from vlmrl.config.run import RlConfig
from vlmrl.errors import SyncError
from vlmrl.rollout.sampling import Sampling
from vlmrl.types import Experience, Floats, Group, Metrics, Prompt, Sample, Score


class Prompts(Protocol):
    """The endless stream of questions."""

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        """The next `count` prompts, and what it took to fetch them."""


class Engine(Protocol):
    """Samples answers."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """One group per prompt, in order."""


class Rewarder(Protocol):
    """Says what answers are worth."""

    def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        """One score per answer, group by group."""


class Reference(Protocol):
    """A model that is asked for log-probabilities and never trained."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """One array of [T] per sample."""


class Policy(Reference, Protocol):
    """The model that is trained."""

    def update(self, experience: Experience, *, step: int) -> Metrics:
        """Learn from the experience; one or several optimizer steps."""

    def publish(self, version: int) -> Metrics:
        """Hand the weights to the engines, and prove that they arrived."""


class Report(Protocol):
    """What the run shows while it runs."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure a part of the step as `time/<name>_s`."""

    def step(self, step: int, metrics: Metrics) -> None:
        """One step is done."""


class Judged(NamedTuple):
    """A step's answers and what became of them; what a transcript is written from."""

    groups: list[Group]
    scores: list[list[Score]]
    rewards: list[Floats]
    """N arrays of [G], after shaping."""
    experience: Experience


def train(
    config: RlConfig,
    *,
    prompts: Prompts,
    engine: Engine,
    rewarder: Rewarder,
    policy: Policy,
    reference: Reference | None,
    report: Report,
    check_sight: Callable[[int, Sequence[Group]], Metrics],
    check_publish: Callable[[int], Metrics],
    after_step: Callable[[int, Judged], Metrics],
    save: Callable[[int], None],
    first_step: int,
    last_step: int,
) -> None:
    """Run the steps `first_step..last_step`, both included.

    The engines hold version `first_step - 1` when this starts. `check_sight` meets the answers while engines and policy
    still hold the weights that made them; `check_publish` asks whether the new ones work. `after_step` evaluates and
    writes; `save` comes last, so that a run that goes on after a kill lacks nothing of the steps before.
    """
    sampling = Sampling(
        n=config.rollout.n_samples_per_prompt,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.train.seed,
    )
    for step in range(first_step, last_step + 1):
        with report.phase("data"):
            drawn, drawing = prompts.draw(config.rollout.batch_size)
        with report.phase("rollout"):
            groups = engine.generate(drawn, sampling)
            check_versions(groups, version=step - 1)
        seeing = check_sight(step, groups)
        with report.phase("reward"):
            scores = rewarder.score(groups)
        samples = to_samples(groups)
        with report.phase("logprob"):
            has_one_pass = is_one_pass(config.rollout, config.train, config.algo)
            old = None if has_one_pass else policy.logprobs(samples)
            ref = reference.logprobs(samples) if reference is not None else None
        judged, judging = judge(config, groups, scores, samples, old=old, ref=ref)
        with report.phase("update"):
            learning = policy.update(judged.experience, step=step)
        if old is None:
            check_agreement(config, learning)
        with report.phase("publish"):
            publishing = policy.publish(step)
        probing = check_publish(step)
        after = after_step(step, judged)
        report.step(step, drawing | seeing | judging | learning | publishing | probing | after)
        save(step)


def to_samples(groups: Sequence[Group]) -> list[Sample]:
    """Every answer as a sample, group by group."""
    return [
        Sample(
            tokens=rollout.tokens,
            sampled=rollout.sampled,
            media=group.prompt.media,
            group=number,
            source=group.prompt.source,
        )
        for number, group in enumerate(groups)
        for rollout in group.rollouts
    ]


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


def judge(
    config: RlConfig,
    groups: list[Group],
    scores: list[list[Score]],
    samples: list[Sample],
    *,
    old: list[Floats] | None,
    ref: list[Floats] | None,
) -> tuple[Judged, Metrics]:
    """From scores to advantages, and the metrics of all that is known before learning.

    Without `old` log-probabilities the policy compares itself with the engine while it learns.

    Raises:
        SyncError: engine and trainer disagree on the log-probabilities of what was sampled.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_sampled = torch.tensor([rollout.num_sampled for rollout in rollouts])
    is_truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])
    raw = torch.tensor([score.total for group in scores for score in group], dtype=torch.float32)
    rewards = shape(
        raw,
        num_sampled=num_sampled,
        is_truncated=is_truncated,
        max_new_tokens=config.rollout.max_new_tokens,
        overlong_buffer=config.reward.overlong_buffer_len,
        overlong_factor=config.reward.overlong_penalty_factor,
        truncated_coefficient=config.reward.stop_properly_penalty_coef,
        clip_range=config.reward.clip_range,
    )
    by_group = rewards.reshape(len(groups), -1)
    sampled = pad([torch.tensor(sample.sampled) for sample in samples])
    reference_gap = None if old is None or ref is None else pad_floats(old, ref, estimator=config.algo.kl.estimator)
    values = advantages(
        by_group,
        sampled,
        estimator=config.algo.advantage.estimator,
        gamma=config.algo.advantage.gamma,
        no_std_norm=config.algo.advantage.no_std_norm,
        penalty=None
        if reference_gap is None or config.algo.kl.use_loss
        else config.algo.kl.init_coef * torch.where(sampled, reference_gap, 0.0),
    )
    experience = Experience(
        samples=samples,
        advantages=[row[: len(s.tokens)].numpy() for row, s in zip(values.float(), samples, strict=True)],
        old_logprobs=old,
        rollout_logprobs=[rollout.logprobs for rollout in rollouts],
        ref_logprobs=ref if config.algo.kl.use_loss else None,
    )
    metrics = {
        "batch/tokens": float(sum(len(sample.tokens) for sample in samples)),
        "reward/mean": float(raw.mean()),
        "reward/std": float(raw.std(correction=0)),
        "reward/shaped_mean": float(rewards.mean()),
        "reward/failed": float(sum(score.failed for group in scores for score in group)),
        "group/constant_fraction": float(is_constant(by_group).float().mean()),
        "response/tokens_mean": float(num_sampled.float().mean()),
        "response/tokens_max": float(num_sampled.max()),
        "response/truncated_fraction": float(is_truncated.float().mean()),
    }
    every = [score for group in scores for score in group]
    for name in sorted({name for score in every for name in score.parts}):
        metrics[f"reward/parts/{name}"] = float(np.mean([score.parts.get(name, 0.0) for score in every]))
    if reference_gap is not None:
        metrics["kl/reference"] = float(reference_gap[sampled].mean())
    if old is not None:
        agreement = compare_engine(experience, old)
        check_agreement(config, agreement)
        metrics |= agreement
    return Judged(groups=groups, scores=scores, rewards=list(by_group.numpy()), experience=experience), metrics


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
    if config.ds.load_in_4bit and config.vllm.qlora_base == "original":
        return config.vllm.max_logprob_diff or math.inf
    return config.vllm.max_logprob_diff or (1e-3 if config.ds.param_dtype == "fp32" else 0.1)


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


def pad(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, T] from B rows of different lengths, filled up with zeros."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def pad_floats(old: Sequence[Floats], ref: Sequence[Floats], *, estimator: str) -> torch.Tensor:
    """[B, T] of the KL estimate between two lists of per-token log-probabilities; 0 beyond a row's end."""
    return kl_to_reference(
        pad([torch.tensor(row) for row in old]),
        pad([torch.tensor(row) for row in ref]),
        estimator=estimator,  # type: ignore[arg-type]
    )
