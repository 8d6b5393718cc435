"""The checks of an RL run, built from its roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from vlmrl.cluster.build import Roles
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.models import RemotePolicy
from vlmrl.cluster.sync_plan import format_sync
from vlmrl.config.verbs import RlConfig
from vlmrl.data.responses import to_samples
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.plugins import Processor
from vlmrl.trainer.protocols import Report
from vlmrl.types import Floats, Group, Metrics
from vlmrl.verify.adapters import AdapterCheck, format_check, prompt_of, sampling_of
from vlmrl.verify.images import ImageGroundingCheck
from vlmrl.verify.layouts import check_layouts
from vlmrl.verify.logprobs import are_alike, check_groups, largest_gap, noise_floor, rounding, with_logprobs
from vlmrl.verify.noise import NoiseCheck, Paths, choose, fewest


class Messages(Report, Protocol):
    """A report that also shows messages."""

    def say(self, message: str, /) -> None:
        """Print a line."""


class _Comparison(NamedTuple):
    groups: Sequence[Group]
    """Responses with the engine's log-probs of the current weights."""
    metrics: Metrics
    """Differences from the trainer's."""


@dataclass(frozen=True, slots=True)
class Checks:
    """The checks of a step's responses, and of each weight sync. A check that fails raises SyncError."""

    config: RlConfig
    report: Messages
    engines: RemoteEngines
    policy: RemotePolicy
    images: ImageGroundingCheck
    noise: NoiseCheck | None
    adapters: AdapterCheck | None
    first_step: int
    """The first step after a start or a resume."""

    def check_responses(self, step: int, groups: Sequence[Group]) -> Callable[[], Metrics]:
        """Check a step's responses before its update, while engines and policy hold the weights that sampled them.

        Returns a function that waits for the engine's part of the check, which needs its weights only, and returns the
        metrics.
        """
        metrics: Metrics = {}
        if step == self.first_step:
            with self.report.phase("verify_layouts"):
                metrics |= check_layouts(groups, self.policy.compare_layouts)
        if self.images.is_due(step, groups):
            with self.report.phase("verify_images"), self.policy.uncounted():
                metrics |= self.images.check(groups, scored=partial(self._with_current_logprobs, step))
        if self.config.train.queue_size:
            is_measured = self.noise is not None and self.noise.is_due(step)
            few, _ = choose(groups, np.random.default_rng([self.config.train.seed % 2**63, step]))
            # Two responses if they are long enough, unless noise is measured too: this pass is added to each step.
            compare = self._score_again(few if is_measured else fewest(few))
            if not is_measured:
                return lambda: metrics | compare().metrics
            groups, agreement = compare()
            metrics |= agreement
        if self.noise is not None:
            with self.report.phase("verify_noise"), self.policy.uncounted():
                metrics |= self.noise.check(step, groups)
        return lambda: metrics

    def _with_current_logprobs(self, step: int, groups: Sequence[Group]) -> Sequence[Group]:
        """Let an engine score the groups again if older weights have sampled any of their tokens."""
        versions = {version for group in groups for rollout in group.rollouts for version in rollout.versions}
        return groups if versions <= {step - 1} else with_logprobs(groups, self.engines.score(groups))

    def _score_again(self, few: Sequence[Group]) -> Callable[[], _Comparison]:
        """Let an engine and the trainer score a few responses again, which older weights have sampled.

        Returns a function that waits for the engine and compares the two. If an engine dies, nothing is compared in
        this step.
        """
        if not few:
            return lambda: _Comparison([], {})
        with self.report.phase("verify_again"), self.policy.uncounted():
            take_scores = self.engines.begin_scoring(few)
            logprobs = self.policy.logprobs(to_samples(few))

        def compare() -> _Comparison:
            with self.report.phase("verify_again"):
                scores = take_scores()
            if scores is None:
                return _Comparison([], {})
            rescored = with_logprobs(few, scores)
            metrics = check_groups(self.config, rescored, logprobs)
            if self.noise is not None:
                metrics |= self.noise.compare(rescored, logprobs)
            return _Comparison(rescored, metrics)

        return compare

    def check_sync(self, version: int) -> Metrics:
        """Check the engines after a weight sync, before they generate with it."""
        if self.adapters is None:
            return {}
        with self.report.phase("verify_adapters"), self.policy.uncounted():
            return self.adapters.check(version)


def make_checks(
    config: RlConfig,
    processor: Processor,
    adapter: AdapterPlan | None,
    roles: Roles,
    report: Messages,
    *,
    on_gpu: bool,
    first_step: int,
) -> Checks:
    """Build the checks that the settings enable."""
    engines, policy = roles.engines, roles.policy
    return Checks(
        config,
        report,
        engines,
        policy,
        images=image_check(config, roles),
        noise=noise_check(config, engines, policy, on_gpu=on_gpu, say=report.say),
        adapters=adapter_check(config, processor, engines, policy, adapter),
        first_step=first_step,
    )


def report_adapter_check(config: RlConfig, adapter: AdapterPlan, checks: Checks, *, version: int) -> None:
    """Show how the adapter reaches the engines, and the result of checking it after the first weight sync."""
    checks.report.say(format_sync(adapter, ds=config.ds, vllm=config.vllm))
    checks.report.say(format_check(checks.check_sync(version)))


def image_check(config: RlConfig, roles: Roles) -> ImageGroundingCheck:
    """Return the image check of every path that computes log-probs in this run, of the critic and of reward models."""
    policy, reference, critic, teacher = roles.policy, roles.reference, roles.critic, roles.teacher
    paths = {
        "engine": roles.engines.score,
        "old": lambda groups: policy.logprobs(to_samples(groups)),
        # A second time, from the vision cache that the first pass filled.
        "old_again": lambda groups: policy.logprobs(to_samples(groups)),
        "padded": lambda groups: policy.logprobs(to_samples(groups), layout="padded"),
        "update": lambda groups: policy.logprobs(to_samples(groups), gradient=True),
    }
    if reference is not None:
        paths["reference"] = lambda groups: reference.logprobs(to_samples(groups))
    if teacher is not None:
        paths["teacher"] = lambda groups: teacher.logprobs(to_samples(groups))
    if critic is not None:
        paths["critic"] = lambda groups: critic.values(to_samples(groups))
    paths |= {f"{model.name}_reward": model.score_by_token for model in roles.reward_sources.models}
    of_policy = {"engine", "old", "old_again", "padded", "update"}
    return ImageGroundingCheck(
        config.train.image_check_steps, paths=paths, bound=largest_gap(config), foreign=paths.keys() - of_policy
    )


def noise_check(
    config: RlConfig,
    engines: RemoteEngines,
    policy: RemotePolicy,
    *,
    on_gpu: bool,
    say: Callable[[str], None],
) -> NoiseCheck | None:
    """Return the comparison of engine and trainer by measured noise; None if the settings make them differ."""
    if not are_alike(config):
        return None
    # In fp32 on GPUs only the fixed floor is used (see `noise_floor`), and 4-bit layers cannot compute in fp64.
    is_measured = config.ds.param_dtype == "bf16" or not (on_gpu or config.ds.load_in_4bit)

    def padded(groups: Sequence[Group], **options: bool) -> list[Floats]:
        return policy.logprobs(to_samples(groups), layout="padded", **options)

    paths = Paths(
        prefill=engines.score,
        padded=padded,
        exact=partial(padded, exact=True) if is_measured else None,
        layout=None
        if policy.layout == "padded"
        else lambda groups: policy.logprobs(to_samples(groups), undivided=True),
    )
    return NoiseCheck(
        paths,
        floor=noise_floor(config, on_gpu=on_gpu),
        stops=config.vllm.max_logprob_diff is None,
        in_turn=config.vllm.enable_sleep,
        seed=config.train.seed,
        say=say,
    )


def adapter_check(
    config: RlConfig, processor: Processor, engines: RemoteEngines, policy: RemotePolicy, adapter: AdapterPlan | None
) -> AdapterCheck | None:
    """Return the check of adapters after every weight sync; None without adapters."""
    if adapter is None:
        return None
    return AdapterCheck(
        engines=engines,
        learner=policy,
        prompt=partial(prompt_of, processor=processor, data=config.data),
        sampling=sampling_of(config.rollout, seed=config.train.seed),
        bound=largest_gap(config),
        floor=rounding(config),
        is_apart=adapter.fits_engine,
    )
