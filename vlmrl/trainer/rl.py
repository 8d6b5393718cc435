"""The loop, over Protocols: no Ray, DeepSpeed or vLLM in it.

Asynchrony is another Engine, an algorithm is another estimator or loss, PPO is one role more; none is another loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol

from vlmrl.algorithms.kl import KlController
from vlmrl.config.adapters import is_one_pass
from vlmrl.config.run import RlConfig
from vlmrl.data.responses import to_samples
from vlmrl.errors import RewardError
from vlmrl.parallel import together
from vlmrl.rollout.sampling import Sampling
from vlmrl.system import stops
from vlmrl.trainer.experience import Judged, Passes, judge, numbers, worth
from vlmrl.trainer.filtering import Seen, Sifted, is_solved, sift, too_few
from vlmrl.types import Experience, Floats, Group, Metrics, Prompt, Sample, Score
from vlmrl.verify.logprobs import check_agreement, check_versions


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
        the infrastructure failed `failed`."""


class Reference(Protocol):
    """A model that is asked for log-probabilities and never trained."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """One array of [T] per sample."""


class Policy(Reference, Protocol):
    """The model that is trained."""

    def update(self, experience: Experience, *, step: int) -> Metrics:
        """Learn from the experience; one or several optimizer steps."""

    def take_pass_metrics(self) -> Metrics:
        """Metrics of the passes since the last call, over all models."""


class WeightSync(Protocol):
    """The way of the policy's weights to the engines."""

    def sync(self, version: int) -> Metrics:
        """Bring the current weights to all engines, and prove that they arrived."""


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


class Carried(NamedTuple):
    """What the next step needs of those before it, beside models and data."""

    kl_coef: float
    """The weight of the KL to the reference."""
    seen: Seen = Seen()
    """What responses were worth so far."""


class Course:
    """How far a run is, in prompts: `total` of them make its episodes, of which `drawn` have been drawn."""

    def __init__(self, total: int, *, drawn: int = 0) -> None:
        self.total = total
        self.drawn = drawn

    @property
    def left(self) -> int:
        # A run may go on with fewer episodes than it has made.
        return max(self.total - self.drawn, 0)


class Collected(NamedTuple):
    """What a step has drawn."""

    sifted: list[Sifted]
    """Every group, those that are not trained on included."""
    metrics: Metrics

    @property
    def kept(self) -> list[Sifted]:
        return [one for one in self.sifted if one.is_kept]


class Ending(NamedTuple):
    """How a run ended."""

    step: int
    """The last that was finished."""
    why: str | None = None
    """For people, where the run ended before its last step; None: that was its last."""
    is_solved: bool = False
    """Nothing is left to learn from its prompts."""
    left_out: int = 0
    """Prompts at the end of the data, of which there were too few for one more batch."""


class ExhaustedError(RewardError):
    """Dynamic filtering found too few groups that teach, and not because the prompts are solved."""


def train(
    config: RlConfig,
    *,
    prompts: Prompts,
    engine: Engine,
    rewarder: Rewarder,
    policy: Policy,
    weight_sync: WeightSync,
    reference: Reference | None,
    critic: Critic | None,
    report: Report,
    check_responses: Callable[[int, Sequence[Group]], Metrics],
    check_publish: Callable[[int], Metrics],
    after_step: Callable[[int, Judged], Metrics],
    save: Callable[[int, Carried], None],
    first_step: int,
    last_step: int,
    course: Course,
    carried: Carried,
) -> Ending:
    """Run the steps `first_step..last_step`, both included, as far as the prompts of the `course` go.

    The engines hold version `first_step - 1` when this starts, and `carried` is for the first step. `check_responses`
    meets the answers while engines and policy still hold the weights that made them; `check_publish` asks whether the
    new ones work. `after_step` evaluates and writes; `save` comes last, with what the next step is given, so that a run
    that goes on after a kill lacks nothing of the steps before.

    Raises:
        ExhaustedError: too few groups teach; what was learnt before is whole.
        Stopped: the run was asked to stop; the last step whose update has begun is whole.
    """
    kl_controller = KlController(coef=carried.kl_coef, target=config.algo.kl.target, horizon=config.algo.kl.horizon)
    seen = carried.seen
    for step in range(first_step, last_step + 1):
        start = progress(config, step - 1, course)
        collected = collect(
            config, step, prompts=prompts, engine=engine, rewarder=rewarder, report=report, course=course, seen=seen
        )
        if isinstance(collected, Ending):
            return collected
        seen = seen.joined(collected.sifted)
        groups, scores = [one.group for one in collected.kept], [one.scores for one in collected.kept]
        seeing = check_responses(step, groups)
        samples = to_samples(groups)
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
            groups,
            scores,
            Passes(samples, old=old, ref=ref, values=values),
            kl_coef=kl_controller.coef,
            span=(start, progress(config, step, course)) if config.algo.dynamic_filtering_enable else None,
        )
        left_out = [(one.group, one.scores, one.rewards) for one in collected.sifted if not one.is_kept]
        judged = judged._replace(left_out=left_out)
        # An update cannot be taken back: once it has begun, the step is finished and reported as any other.
        with stops.finishing():
            with report.phase("update"):
                learning = learn(
                    judged.experience,
                    step,
                    policy=None if only_critic else policy,
                    critic=critic,
                    in_turn=config.critic_is_with_actor,
                )
            if old is None and any(sample.sampled.any() for sample in judged.experience.samples):
                check_agreement(config, learning)
            if not only_critic:
                # A policy that does not move stays with its reference, which is no reason to let it go.
                kl_controller = kl_controller.updated(judging.get("kl/reference", 0.0), num_samples=len(samples))
            with report.phase("publish"):
                syncing = weight_sync.sync(step)
            passes = policy.take_pass_metrics()
            probing = check_publish(step)
            after = after_step(step, judged)
            if step == last_step and 0 < course.left < config.rollout.batch_size:
                after = after | {"data/left_out": float(course.left)}
            report.step(step, collected.metrics | seeing | judging | learning | syncing | passes | probing | after)
            save(step, Carried(kl_controller.coef, seen))
        stops.check()
    return Ending(max(last_step, first_step - 1))


def progress(config: RlConfig, step: int, course: Course) -> float:
    """How far the run is after `step` steps, from 0 to 1: by its prompts or by `train.max_steps`, whichever ends it."""
    by_prompts = course.drawn / course.total
    by_steps = step / config.train.max_steps if config.train.max_steps else 0.0
    return min(max(by_prompts, by_steps), 1.0)


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
    config: RlConfig,
    step: int,
    *,
    prompts: Prompts,
    engine: Engine,
    rewarder: Rewarder,
    report: Report,
    course: Course,
    seen: Seen,
) -> Collected | Ending:
    """Draw prompts, let the engines answer, and score the answers while others are still being written.

    With `algo.dynamic_filtering_enable` (DAPO, arXiv:2503.14476) fresh prompts take the places of groups that teach
    nothing until the batch is full. The run ends where the prompts of the course cannot fill it, and where most of the
    groups that teach nothing are solved. The metrics of rewards and lengths are over all groups that were drawn.

    Raises:
        SyncError: an answer comes from other weights than the trainer's.
        ExhaustedError: too few groups teach after `algo.dynamic_filtering_max_draws` draws.
        RewardError: not one batch could be filled with the prompts of the whole run.
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
    sifted: list[Sifted] = []
    missing, left_out = size, course.left
    num_failed, num_lost = 0, 0
    drawing: Metrics = {}
    while missing:
        if course.left < missing:
            return _out_of_prompts(config, step, course, left_out, is_solved(config, sifted, seen.joined(sifted)))
        if len(sifted) == most:
            return _exhausted(config, step, sifted, seen.joined(sifted))
        with report.phase("data"):
            drawn, spent = prompts.draw(min(missing, most - len(sifted)))
        course.drawn += len(drawn)
        with report.phase("rollout"):
            found = engine.generate(drawn, sampling, rewarder.begin)
            check_versions(found, version=step - 1)
        with report.phase("reward"):
            num_answers = sampling.n * max(size, len(sifted) + len(found))
            scored = rewarder.score(found, out_of=num_answers, failed=num_lost)
            num_failed += sum(score.failed for group_scores in scored for score in group_scores)
            num_lost += sum(not score.has_reward for group_scores in scored for score in group_scores)
        moved = drawing.get("media/bytes_moved", 0.0) + spent["media/bytes_moved"]
        drawing = spent | {"media/bytes_moved": moved}
        sifted += sift(config, found, scored)
        missing = size - sum(one.is_kept for one in sifted)
    drawing["reward/failed"] = float(num_failed)
    return Collected(sifted, drawing | _numbers(config, sifted))


def _numbers(config: RlConfig, sifted: Sequence[Sifted]) -> Metrics:
    """The metrics of all groups; with dynamic filtering those of the ones that are trained on as well."""

    def of(some: Sequence[Sifted]) -> Metrics:
        groups, scores = [one.group for one in some], [one.scores for one in some]
        return numbers(groups, scores, worth(config, groups, scores))

    metrics = of(sifted)
    if config.algo.dynamic_filtering_enable:
        kept = [one for one in sifted if one.is_kept]
        metrics |= {"filter/kept_fraction": len(kept) / len(sifted), "filter/groups_drawn": float(len(sifted))}
        metrics |= {own: value for name, value in of(kept).items() if (own := _OF_KEPT.get(name))}
    return metrics


_OF_KEPT = {
    "reward/mean": "filter/reward_mean",
    "reward/std": "filter/reward_std",
    "response/tokens_mean": "filter/tokens_mean",
    "response/truncated_fraction": "filter/truncated_fraction",
}
"""What metrics are called that are over the groups which are trained on."""


def _out_of_prompts(config: RlConfig, step: int, course: Course, left_out: int, solved: bool) -> Ending:
    episodes, size = config.train.num_episodes, config.rollout.batch_size
    if step == 1 and not solved:
        raise RewardError(
            f"of the run's {course.total} prompts (train.num_episodes {episodes}) too few teach for one batch of "
            f"{size}: lower --rollout.batch_size, choose easier or harder prompts, or raise --train.num_episodes"
        )
    why = f"the run ends after step {step - 1}: the {course.total} prompts of its episodes are drawn"
    if left_out:
        why += f"; the last {left_out} do not fill a batch of {size} and are left out"
    if solved:
        why += "; most of them are solved"
    return Ending(step - 1, why=why, is_solved=solved, left_out=left_out)


def _exhausted(config: RlConfig, step: int, sifted: Sequence[Sifted], seen: Seen) -> Ending:
    line = too_few(config, sifted)
    if is_solved(config, sifted, seen):
        why = f"the run ends after step {step - 1}, its prompts are solved: {line}"
        return Ending(step - 1, why=why, is_solved=True)
    raise ExhaustedError(
        f"{line}; choose easier or harder prompts, widen the range, or raise --algo.dynamic_filtering_max_draws"
    )
