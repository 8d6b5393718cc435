"""The checks of a run of reinforcement learning: what they ask of its roles, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.models import PolicyWithoutAdapter, RemoteCritic, RemotePolicy, RemoteReference
from vlmrl.cluster.rewards import RewardSources
from vlmrl.config.run import RlConfig
from vlmrl.data.responses import to_samples
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.observe.report import RunReport
from vlmrl.plugins import Processor
from vlmrl.types import Floats, Group, Metrics
from vlmrl.verify.adapters import Probe, question, sampling_of
from vlmrl.verify.images import SightCheck
from vlmrl.verify.layouts import check_layouts
from vlmrl.verify.logprobs import are_alike, largest_gap, noise_floor, rounding
from vlmrl.verify.noise import NoiseCheck, Paths


@dataclass(frozen=True, slots=True)
class Checks:
    """What must be true of a step's responses, and of each publish. A check that fails raises SyncError."""

    report: RunReport
    policy: RemotePolicy
    sight: SightCheck
    noise: NoiseCheck | None
    probe: Probe | None
    first_step: int
    """Of this process: the first after a start or a resume."""

    def responses(self, step: int, groups: Sequence[Group]) -> Metrics:
        """Before the step's update, while engines and policy hold the weights that made the responses."""
        metrics: Metrics = {}
        if step == self.first_step:
            with self.report.phase("layout"):
                metrics |= check_layouts(groups, self.policy.compare_layouts)
        if self.sight.is_due(step, groups):
            with self.report.phase("sight"), self.policy.uncounted():
                metrics |= self.sight.check(groups)
        if self.noise is not None:
            with self.report.phase("noise"), self.policy.uncounted():
                metrics |= self.noise.check(step, groups)
        return metrics

    def published(self, version: int) -> Metrics:
        """After a publish, before anything is generated with it."""
        if self.probe is None:
            return {}
        with self.report.phase("probe"), self.policy.uncounted():
            return self.probe.check(version)


def sight_check(
    config: RlConfig,
    engines: RemoteEngines,
    policy: RemotePolicy,
    reference: RemoteReference | PolicyWithoutAdapter | None,
    critic: RemoteCritic | None,
    reward_sources: RewardSources,
) -> SightCheck:
    """The check of every path by which this run gets log-probs; and of the critic's values and of reward models, which
    must see as well."""
    paths = {
        "engine": engines.score,
        "old": lambda groups: policy.logprobs(to_samples(groups)),
        # What the first time left in the vision cache is read back now.
        "old_again": lambda groups: policy.logprobs(to_samples(groups)),
        "padded": lambda groups: policy.logprobs(to_samples(groups), layout="padded"),
        "update": lambda groups: policy.logprobs(to_samples(groups), gradient=True),
    }
    if reference is not None:
        paths["reference"] = lambda groups: reference.logprobs(to_samples(groups))
    if critic is not None:
        paths["critic"] = lambda groups: critic.values(to_samples(groups))
    paths |= {f"{model.name}_reward": model.everywhere for model in reward_sources.models}
    own = {"engine", "old", "old_again", "padded", "update"}
    return SightCheck(
        config.train.sight_check_steps, paths=paths, bound=largest_gap(config), foreign=paths.keys() - own
    )


def noise_check(
    config: RlConfig,
    engines: RemoteEngines,
    policy: RemotePolicy,
    *,
    on_gpu: bool,
    say: Callable[[str], None],
) -> NoiseCheck | None:
    """The comparison of engine and trainer by measured noise; None where they differ by choice."""
    if not are_alike(config):
        return None
    # In fp32 on GPUs the ceiling holds alone (see `noise_floor`), and layers in 4 bits do not multiply in fp64.
    is_measured = config.ds.param_dtype == "bf16" or not (on_gpu or config.ds.load_in_4bit)

    def padded(groups: Sequence[Group], **how: bool) -> list[Floats]:
        return policy.logprobs(to_samples(groups), layout="padded", **how)

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


def adapter_probe(
    config: RlConfig, tools: Processor, engines: RemoteEngines, policy: RemotePolicy, adapter: AdapterPlan | None
) -> Probe | None:
    """The check of what every publish of adapters did; None where there are none."""
    if adapter is None:
        return None
    return Probe(
        engines=engines,
        learner=policy,
        question=partial(question, processor=tools, data=config.data),
        sampling=sampling_of(config.rollout, seed=config.train.seed),
        bound=largest_gap(config),
        floor=rounding(config),
        is_apart=adapter.fits_engine,
    )
