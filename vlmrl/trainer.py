"""The loop, over Protocols: no Ray, DeepSpeed or vLLM in it.

Asynchrony is another Engine, an algorithm is another estimator or loss, PPO is one role more; none is another loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from vlmrl.agreement import check_agreement, check_versions
from vlmrl.algorithms.filtering import keeps
from vlmrl.algorithms.kl import AdaptiveKl
from vlmrl.config.adapter_checks import is_one_pass
from vlmrl.config.run import RlConfig
from vlmrl.data.answers import to_samples
from vlmrl.errors import RewardError
from vlmrl.judging import Judged, Passes, judge
from vlmrl.rollout.sampling import Sampling
from vlmrl.together import together
from vlmrl.types import Experience, Floats, Group, Metrics, Prompt, Sample, Score


class Prompts(Protocol):
    """The endless stream of questions."""

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        """The next `count` prompts, and what it took to fetch them."""


class Engine(Protocol):
    """Samples answers."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        """One group per prompt, in order; `on_group` is told of each as soon as it is there, in any order."""


class Rewarder(Protocol):
    """Says what answers are worth."""

    def begin(self, group: Group) -> None:
        """Start on a group, and return at once: `score` will ask for it."""

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        """One score per answer, group by group. They are some of a step's `out_of` answers, None: all; of the others
        `failed` could not be scored."""


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


class Critic(Protocol):
    """The model that learns what to expect of an answer in the making."""

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """One array of [T] per sample: what is expected from each sampled token on; 0 elsewhere."""

    def update(self, experience: Experience, *, step: int) -> Metrics:
        """Learn from the experience's returns; one or several optimizer steps."""


class Report(Protocol):
    """What the run shows while it runs."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure a part of the step as `time/<name>_s`."""

    def step(self, step: int, metrics: Metrics) -> None:
        """One step is done."""


class Collected(NamedTuple):
    """The answers of a step and what they are worth."""

    groups: list[Group]
    scores: list[list[Score]]
    metrics: Metrics


def train(
    config: RlConfig,
    *,
    prompts: Prompts,
    engine: Engine,
    rewarder: Rewarder,
    policy: Policy,
    reference: Reference | None,
    critic: Critic | None,
    report: Report,
    check_sight: Callable[[int, Sequence[Group]], Metrics],
    check_publish: Callable[[int], Metrics],
    after_step: Callable[[int, Judged], Metrics],
    save: Callable[[int, float], None],
    first_step: int,
    last_step: int,
    kl_coef: float,
) -> None:
    """Run the steps `first_step..last_step`, both included.

    The engines hold version `first_step - 1` when this starts, and `kl_coef` is the weight of the KL to the reference
    on the first of them. `check_sight` meets the answers while engines and policy still hold the weights that made
    them; `check_publish` asks whether the new ones work. `after_step` evaluates and writes; `save` comes last, with the
    next step's `kl_coef`, so that a run that goes on after a kill lacks nothing of the steps before.
    """
    leash = AdaptiveKl(coef=kl_coef, target=config.algo.kl.target, horizon=config.algo.kl.horizon)
    for step in range(first_step, last_step + 1):
        collected = collect(config, step, prompts=prompts, engine=engine, rewarder=rewarder, report=report)
        seeing = check_sight(step, collected.groups)
        samples = to_samples(collected.groups)
        only_critic = critic is not None and step <= config.critic.freezing_steps
        with report.phase("logprob"):
            finds_old = is_one_pass(config.rollout, config.train, config.algo) and not only_critic
            old = None if finds_old else policy.logprobs(samples)
            ref = reference.logprobs(samples) if reference is not None else None
        values = None
        if critic is not None:
            with report.phase("value"):
                values = critic.values(samples)
        judged, judging = judge(
            config,
            collected.groups,
            collected.scores,
            Passes(samples, old=old, ref=ref, values=values),
            kl_coef=leash.coef,
        )
        with report.phase("update"):
            learning = learn(
                judged.experience,
                step,
                policy=None if only_critic else policy,
                critic=critic,
                in_turn=config.critic_is_with_actor,
            )
        if old is None:
            check_agreement(config, learning)
        if not only_critic:
            # A policy that does not move stays with its reference, which is no reason to let it go.
            leash = leash.updated(judging.get("kl/reference", 0.0), num_samples=len(samples))
        with report.phase("publish"):
            publishing = policy.publish(step)
        probing = check_publish(step)
        after = after_step(step, judged)
        report.step(step, collected.metrics | seeing | judging | learning | publishing | probing | after)
        save(step, leash.coef)


def learn(experience: Experience, step: int, *, policy: Policy | None, critic: Critic | None, in_turn: bool) -> Metrics:
    """Let policy and critic learn, side by side where they lie apart.

    `in_turn` where they have the same processes: ranks that met their calls in different orders would wait for each
    other for ever.
    """
    updates = [partial(learner.update, experience, step=step) for learner in (critic, policy) if learner is not None]
    found: Metrics = {}
    for metrics in [update() for update in updates] if in_turn else together(*updates):
        found |= metrics
    return found


def collect(
    config: RlConfig, step: int, *, prompts: Prompts, engine: Engine, rewarder: Rewarder, report: Report
) -> Collected:
    """Draw prompts, let the engines answer, and score the answers while others are still being written.

    With `algo.dynamic_filtering_enable` (DAPO, arXiv:2503.14476) groups whose mean score lies on or beyond the range
    teach too little: fresh prompts take their places until the batch is full.

    Raises:
        SyncError: an answer comes from other weights than the trainer's.
        RewardError: too few groups are kept after `algo.dynamic_filtering_max_draws` draws.
    """
    algo, size = config.algo, config.rollout.batch_size
    most = size * (algo.dynamic_filtering_max_draws if algo.dynamic_filtering_enable else 1)
    sampling = Sampling(
        n=config.rollout.n_samples_per_prompt,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.train.seed,
    )
    groups: list[Group] = []
    scores: list[list[Score]] = []
    means: list[float] = []
    num_failed = 0
    drawing: Metrics = {}
    while len(groups) < size:
        if len(means) == most:
            raise RewardError(_too_few(config, len(groups), means))
        with report.phase("data"):
            drawn, spent = prompts.draw(min(size - len(groups), most - len(means)))
        with report.phase("rollout"):
            found = engine.generate(drawn, sampling, rewarder.begin)
            check_versions(found, version=step - 1)
        with report.phase("reward"):
            num_answers = sampling.n * max(size, len(means) + len(found))
            scored = rewarder.score(found, out_of=num_answers, failed=num_failed)
            num_failed += sum(score.failed for group_scores in scored for score in group_scores)
        moved = drawing.get("media/bytes_moved", 0.0) + spent["media/bytes_moved"]
        drawing = spent | {"media/bytes_moved": moved}
        for group, judged in zip(found, scored, strict=True):
            means.append(float(np.mean([score.total for score in judged])))
            if not algo.dynamic_filtering_enable or keeps(means[-1], *algo.dynamic_filtering_range):
                groups.append(group)
                scores.append(judged)
    drawing["reward/failed"] = float(num_failed)
    if algo.dynamic_filtering_enable:
        drawing |= {"filter/kept_fraction": size / len(means), "filter/groups_drawn": float(len(means))}
    return Collected(groups, scores, drawing)


def _too_few(config: RlConfig, num_kept: int, means: Sequence[float]) -> str:
    low, high = config.algo.dynamic_filtering_range
    below, above = sum(mean <= low for mean in means), sum(mean >= high for mean in means)
    return (
        f"algo.dynamic_filtering_range {low:g} {high:g} kept {num_kept} of {len(means)} groups in "
        f"{config.algo.dynamic_filtering_max_draws} draws, and a step needs {config.rollout.batch_size}: {below} had a "
        f"mean score of {low:g} or less, {above} of {high:g} or more (seen: {min(means):g} to {max(means):g}); choose "
        "easier or harder prompts, widen the range, or raise --algo.dynamic_filtering_max_draws"
    )
