"""Build the roles of a run: start each where the placement puts it, and connect them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from vlmrl.cluster.data import keep_media
from vlmrl.cluster.engine_restarts import EngineRestarts
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.learners import (
    Learners,
    Trained,
    packing_plan,
    remote_critic,
    remote_reference,
    remote_reward_models,
)
from vlmrl.cluster.machine_watch import Watch
from vlmrl.cluster.models import (
    PassMetrics,
    PolicyWithoutAdapter,
    Ranks,
    RemoteCritic,
    RemotePolicy,
    RemoteReference,
    RemoteTeacher,
    StepPlan,
)
from vlmrl.cluster.placement import Place
from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.rewards import RemoteRewarder, RewardSources
from vlmrl.cluster.role_settings import (
    critic_settings,
    engine_builder,
    generation_limit_s,
    policy_settings,
    reference_settings,
    reward_model_settings,
    rewarder_settings,
    source_settings,
    teacher_settings,
)
from vlmrl.cluster.session import Session
from vlmrl.cluster.sync_plan import plan_sync
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.config.bench_verbs import RolloutBench
from vlmrl.config.stages import DpoConfig
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.learning.settings import PolicyAndCriticSettings, PolicySettings
from vlmrl.models.adapter_plan import AdapterPlan, vision_trains
from vlmrl.parallel import run_parallel, settle
from vlmrl.plugins import Processor
from vlmrl.rollout.capacity import format_limits

if TYPE_CHECKING:
    from vlmrl.cluster.engines import ColocatedGroups
    from vlmrl.learning.policy import Policy
    from vlmrl.learning.reference import Reference
    from vlmrl.learning.reward_model import RewardModel
    from vlmrl.learning.teacher import Teacher
    from vlmrl.rollout.engine import RolloutEngine

_Role = TypeVar("_Role")

_SETTLE_S = 30.0
"""Maximum wait for abandoned starts, most of which end when their workers do."""


class Progress(Protocol):
    """Shows users the progress of a run."""

    def say(self, line: str) -> None:
        """Print a line that stays on the screen."""

    def generated(self, done: int, total: int) -> None:
        """Show how many of a step's prompts have responses."""


class Roles(NamedTuple):
    """All roles of a reinforcement learning step."""

    engines: RemoteEngines
    policy: RemotePolicy
    weight_sync: WeightSync
    reference: RemoteReference | PolicyWithoutAdapter | None
    critic: RemoteCritic | None
    reward_sources: RewardSources
    teacher: RemoteTeacher | None = None


@dataclass(frozen=True, slots=True)
class RoleBuilder:
    """Starts roles on the machines of a run, and stops them at its end."""

    machines: Session
    places: dict[str, list[Place]]
    stack: ExitStack
    """Stops the roles when it closes."""
    watch: Watch | None = None
    """The watch over the other machines, if there are any."""
    groups: dict[str, WorkerGroup[Any]] = field(default_factory=dict)
    """Role -> workers, for the roles that have started."""
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set when the run ends: roles that other threads are still starting are stopped at once."""

    def __post_init__(self) -> None:
        # Runs last: threads that wait for roles return once the roles have stopped, and need Ray until then.
        self.stack.callback(settle, _SETTLE_S)

    def group(self, name: str, build: Callable[[], _Role], *, timeout_s: float, **options: bool) -> WorkerGroup[_Role]:
        """Start the workers of a role. They stop with the run, also if they or others fail to start. See
        `WorkerGroup`."""
        group = WorkerGroup(
            name,
            build,
            session=self.machines,
            places=self.places.get(name, [Place(0, ())]),
            timeout_s=timeout_s,
            register_shutdown=self._stop_at_end,
            **options,
        )
        self.groups[name] = group
        return group

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the roles are used. After its end, however it ends, no role starts any more."""
        try:
            yield
        finally:
            self.is_over.set()

    def _stop_at_end(self, stop: Callable[[], None]) -> None:
        self.stack.callback(stop)
        if self.is_over.is_set():
            stop()
        if self.watch is not None:
            self.watch.on_loss(stop)

    def prompts(
        self, config: TrainingConfig | EvalConfig | RolloutBench, say: Callable[[str], None] = print
    ) -> RemotePrompts:
        """Return the source of prompts, after checks of labels and duplicate rows."""
        group = self.group("data", source_settings(config).build, timeout_s=config.train.timeout_s)
        prompts = RemotePrompts(group, say=say)
        if isinstance(config, RlConfig):
            prompts.check_labels()
        if isinstance(config, TrainingConfig):
            prompts.find_duplicates()
        return prompts

    def rewarder(self, config: RlConfig | EvalConfig, say: Callable[[str], None] = print) -> RemoteRewarder | None:
        """Reward functions and servers; None if only models score responses."""
        settings = rewarder_settings(config)
        if settings is None:
            return None
        group = self.group("reward", settings.build, timeout_s=config.train.timeout_s, concurrent=True)
        rewarder = RemoteRewarder(group, say=say)
        self.stack.callback(rewarder.close)
        return rewarder

    def engines(
        self,
        config: RlConfig | EvalConfig,
        report: Progress,
        adapter: AdapterPlan | None = None,
        *,
        build: Callable[[], RolloutEngine] | None = None,
        pools: Sequence[frozenset[str]] = (),
    ) -> RemoteEngines:
        """Return the engines. They make room for `adapter` if they can apply it themselves.

        Args:
            build: builds an engine in its process; by default the one that the settings describe.
            pools: sets of roles that share devices. Engines that share GPUs start before the others: vLLM measures the
                free memory, and would count what others load meanwhile as its own.
        """
        timeout_s = max(config.vllm.start_timeout_s, config.train.timeout_s)
        build = build or engine_builder(config, adapter)
        group = self.group("vllm", build, timeout_s=timeout_s, concurrent=True)
        engines = RemoteEngines(
            group,
            timeout_s=generation_limit_s(config),
            sleeps=config.vllm.enable_sleep,
            on_progress=report.generated,
            colocated=partial(self._colocated, pools),
            restarts=EngineRestarts(
                group, limit=config.vllm.max_restarts, obstacle=self._restart_obstacle(pools), say=report.say
            ),
            keep=keep_media if config.has_agent and config.vllm.max_restarts else None,
        )
        self.stack.callback(engines.shutdown)
        status = engines.status()[0]
        for line in (format_limits(status["limits"]), *status.get("notes", ())):
            report.say(line)
        return engines

    def _restart_obstacle(self, pools: Sequence[frozenset[str]]) -> str | None:
        if self._shares_gpus(pools):
            return "it cannot be started again on GPUs that it shares with other models (train.colocate_all)"
        return None

    def _shares_gpus(self, pools: Sequence[frozenset[str]]) -> bool:
        """Whether engines and other roles are on the same GPUs."""
        return self.machines.has_gpus and any("vllm" in pool for pool in pools)

    def _colocated(self, pools: Sequence[frozenset[str]]) -> ColocatedGroups:
        """Return the other roles on the engines' devices."""
        names = [name for pool in pools if "vllm" in pool for name in sorted(pool - {"vllm"})]
        return [self.groups[name] for name in names if name in self.groups]

    def roles(
        self,
        config: RlConfig,
        processor: Processor,
        *,
        adapter: AdapterPlan | None,
        critic_adapter: AdapterPlan | None,
        num_rows: int,
        report: Progress,
        build_engine: Callable[[], RolloutEngine] | None = None,
    ) -> Roles:
        """Start all roles. No weights are synced yet. For `build_engine` see `engines`."""
        starts: list[Callable[[], Any]] = [
            lambda: self.engines(config, report, adapter, build=build_engine, pools=config.pools),
            lambda: self.learners(
                config, processor, adapter=adapter, critic_adapter=critic_adapter, num_rows=num_rows, say=report.say
            ),
            lambda: self.rewarder(config, report.say),
            lambda: self._reward_models(config),
        ]
        # In parallel: starts mostly wait for imports and files. But vLLM measures the free memory of its GPUs, and
        # would count what other roles load meanwhile as its own.
        first = [starts.pop(0)()] if self._shares_gpus(config.pools) else []
        engines, learners, rewarder, groups = [*first, *run_parallel(*starts)]
        ranks = learners.policy.ranks
        models = {role: ranks.over(group) for role, group in groups.items()}
        plan = plan_sync(adapter, ds=config.ds, vllm=config.vllm, vision_trains=vision_trains(config.actor, adapter))
        return Roles(
            engines,
            learners.policy,
            WeightSync(ranks.group, engines, plan),
            learners.reference,
            learners.critic,
            RewardSources(
                rewarder,
                remote_reward_models(config.reward, models),
                say=report.say,
            ),
            learners.teacher,
        )

    def evaluation_roles(
        self, config: EvalConfig, processor: Processor, report: Progress
    ) -> tuple[RemoteEngines, RewardSources]:
        """Start engines and reward sources: all roles of a run that samples and scores without training."""
        starts: list[Callable[[], Any]] = [
            lambda: self.engines(config, report, pools=config.pools),
            lambda: self.rewarder(config, report.say),
            lambda: self._reward_models(config),
        ]
        first = [starts.pop(0)()] if self._shares_gpus(config.pools) else []  # as in `roles`
        engines, rewarder, groups = [*first, *run_parallel(*starts)]
        loop = config.train
        ranks = {
            role: Ranks(group, packing_plan(group, loop, processor, report.say), loop.max_tokens_per_gpu, PassMetrics())
            for role, group in groups.items()
        }
        return engines, RewardSources(rewarder, remote_reward_models(config.reward, ranks), say=report.say)

    def learners(
        self,
        config: TrainingConfig,
        processor: Processor,
        *,
        adapter: AdapterPlan | None,
        critic_adapter: AdapterPlan | None = None,
        num_rows: int,
        say: Callable[[str], None],
    ) -> Learners:
        """Start the policy; the critic if the estimator has one; the reference if the loss reads one; the teacher if
        there is one."""
        trained: Trained
        reference: WorkerGroup[Reference] | None
        teacher: WorkerGroup[Teacher] | None
        trained, reference, teacher = run_parallel(
            lambda: self._trained(config, adapter=adapter, critic_adapter=critic_adapter, num_rows=num_rows),
            lambda: self._reference(config),
            lambda: self._teacher(config),
        )
        loop = config.train
        rl = config if isinstance(config, RlConfig) else None
        max_tokens = (None if rl is None else rl.rollout.max_tokens_per_gpu) or loop.max_tokens_per_gpu
        size = config.ds.sequence_parallel_size
        packing = packing_plan(trained.policy, loop, processor, say, sequence_size=size)
        ranks = Ranks(trained.policy, packing, max_tokens, PassMetrics(), size)
        steps = StepPlan(loop.batch_size, epochs=1 if rl is None else loop.max_epochs, seed=loop.seed)
        policy = RemotePolicy(ranks, steps, whole_responses=rl is not None and rl.loss_reads_responses)
        has_reference = config.has_reference or config.reference_is_base
        return Learners(
            policy,
            remote_reference(config, policy, reference, say) if has_reference else None,
            remote_critic(trained, ranks, steps, say),
            None if teacher is None else RemoteTeacher(ranks.over(teacher)),
        )

    def _trained(
        self,
        config: TrainingConfig,
        *,
        adapter: AdapterPlan | None,
        critic_adapter: AdapterPlan | None,
        num_rows: int,
    ) -> Trained:
        timeout_s = config.train.timeout_s
        policy = policy_settings(config, adapter, num_rows)
        if not isinstance(config, RlConfig) or not config.has_critic:
            return Trained(self.policy(policy), None, None)
        critic = critic_settings(config, critic_adapter, num_rows)
        if config.critic_is_with_actor:
            both = PolicyAndCriticSettings(policy=policy, critic=critic)
            pair = self.group("actor", both.build, timeout_s=timeout_s, distributed=True)
            return Trained(pair, pair, pair)
        policy_group, critic_group = run_parallel(
            lambda: self.policy(policy),
            lambda: self.group("critic", critic.build, timeout_s=timeout_s, distributed=True),
        )
        return Trained(policy_group, critic_group, None)

    def policy(self, settings: PolicySettings) -> WorkerGroup[Policy]:
        """Return the ranks of a policy that does not share them with the critic."""
        return self.group("actor", settings.build, timeout_s=settings.loop.timeout_s, distributed=True)

    def _reference(self, config: TrainingConfig) -> WorkerGroup[Reference] | None:
        """Return the ranks of a reference model; None without one, or if the policy without its adapters is the
        reference."""
        if not isinstance(config, RlConfig | DpoConfig) or not config.has_reference:
            return None
        build = reference_settings(config).build
        return self.group("ref", build, timeout_s=config.train.timeout_s, distributed=True)

    def _teacher(self, config: TrainingConfig) -> WorkerGroup[Teacher] | None:
        """Return the ranks of the teacher; None without one."""
        settings = teacher_settings(config) if isinstance(config, RlConfig) else None
        if settings is None:
            return None
        return self.group("teacher", settings.build, timeout_s=config.train.timeout_s, distributed=True)

    def _reward_models(self, config: RlConfig | EvalConfig) -> dict[str, WorkerGroup[RewardModel]]:
        """Role -> ranks of its reward model."""
        settings = reward_model_settings(config)
        start = partial(self.group, timeout_s=config.train.timeout_s, distributed=True)
        groups = run_parallel(*(partial(start, role, of_role.build) for role, of_role in settings.items()))
        return dict(zip(settings, groups, strict=True))
