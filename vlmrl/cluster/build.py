"""Puts roles on machines: which class runs as which role, with which settings."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vlmrl.cluster.data import wants_of
from vlmrl.cluster.device_path import DevicePath
from vlmrl.cluster.engines import RemoteEngines, RemotePrompts
from vlmrl.cluster.models import Cut, Ranks, RemoteCritic, RemotePolicy, RemoteReference, Steps, Tally
from vlmrl.cluster.placement import Place
from vlmrl.cluster.publish import publication
from vlmrl.cluster.rewards import Judges, RemoteRewarder, RewardModel
from vlmrl.cluster.role_settings import absolute, critic_settings, demand, model_settings, policy_loss
from vlmrl.cluster.session import Session
from vlmrl.cluster.watch import Watch
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.config.roles import REWARD_MODELS
from vlmrl.config.run import EvalConfig, RlConfig, RolloutBench, SftConfig
from vlmrl.config.schedule import optimizer_steps
from vlmrl.config.train import Loop
from vlmrl.config.vllm import Vllm
from vlmrl.models.adapter_plan import AdapterPlan, vision_trains
from vlmrl.observe.run_folder import RunFolder
from vlmrl.parallel import run_parallel, settle
from vlmrl.plugins import Processor
from vlmrl.rewards.client import read_token
from vlmrl.rollout.capacity import described

_SETTLE_S = 30.0
"""For starts that were given up, most of which end as soon as their workers have."""


class Progress(Protocol):
    """Whoever is told what happens."""

    def say(self, what: str) -> None:
        """Something that stays on the screen."""

    def generated(self, done: int, total: int) -> None:
        """How many of a step's prompts are answered."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where roles are put: machines, places, and the stack that stops them."""

    machines: Session
    places: dict[str, list[Place]]
    stack: ExitStack
    watch: Watch | None = None
    """Over the other machines, when there are any."""
    groups: dict[str, WorkerGroup] = field(default_factory=dict)
    """The workers of every role that has started."""
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set when the stack ends: roles that other threads are still starting end at once."""

    def __post_init__(self) -> None:
        # Ends last: what waits for roles has nothing left to wait for, and Ray must not end under it.
        self.stack.callback(settle, _SETTLE_S)

    def group(self, name: str, path: str, settings: Mapping[str, Any], *, timeout_s: float, **how: bool) -> WorkerGroup:
        """Workers of a role, which end with the stage, also when they or others do not start."""
        self.groups[name] = WorkerGroup(
            name,
            path,
            settings,
            session=self.machines,
            places=self.places.get(name, [Place(0, ())]),
            timeout_s=timeout_s,
            at_end=self._at_end,
            **how,
        )
        return self.groups[name]

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Around whatever uses the stage: nothing starts any more once it has ended, whatever its end."""
        try:
            yield
        finally:
            self.is_over.set()

    def _at_end(self, end: Callable[[], None]) -> None:
        self.stack.callback(end)
        if self.is_over.is_set():
            end()
        if self.watch is not None:
            self.watch.at_loss(end)

    def prompts(
        self, config: RlConfig | SftConfig | EvalConfig | RolloutBench, say: Callable[[str], None] = print
    ) -> RemotePrompts:
        settings = {
            "model": config.actor.model_name_or_path,
            "trust_remote_code": config.actor.trust_remote_code,
            "data": config.data,
            "evaluation": getattr(config, "eval", None),
            "seed": config.train.seed,
            "functions": tuple(config.reward.functions) if isinstance(config, RlConfig | EvalConfig) else (),
            "wants": wants_of(config),
        }
        group = self.group("data", "vlmrl.cluster.data.StoredSource", settings, timeout_s=config.train.timeout_s)
        prompts = RemotePrompts(group, say=say)
        if isinstance(config, RlConfig):
            prompts.look_at_labels()
        if isinstance(config, RlConfig | SftConfig):
            prompts.look_at_repeats()
        return prompts

    def rewarder(self, config: RlConfig | EvalConfig, say: Callable[[str], None] = print) -> RemoteRewarder | None:
        """Reward functions and servers; None when models alone say what answers are worth."""
        reward = config.reward
        if not reward.functions and reward.remote_url is None:
            return None
        if reward.user_function is not None:
            # The worker stands in another folder than the user does.
            reward = reward.model_copy(update={"remote_url": absolute(reward.user_function)})
        log = RunFolder(Path(config.ckpt.output_dir).expanduser().absolute()).reward_log
        settings = {"reward": reward, "token": read_token(), "log": log, "label_key": config.data.label_key}
        rewarder = RemoteRewarder(
            self.group(
                "reward",
                "vlmrl.rewards.rewarder.Rewarder",
                settings,
                timeout_s=config.train.timeout_s,
                interruptible=True,
            ),
            say=say,
        )
        self.stack.callback(rewarder.close)
        return rewarder

    def engines(
        self, config: RlConfig | EvalConfig, report: Progress, adapter: AdapterPlan | None = None
    ) -> RemoteEngines:
        """The engines; they prepare for an adapter that they can apply themselves."""
        settings = {
            "model": config.actor.model_name_or_path,
            "vllm": config.vllm,
            "columns": config.data,
            "trust_remote_code": config.actor.trust_remote_code,
            "dtype": config.ds.param_dtype,
            "max_model_len": config.data.max_len + config.rollout.max_new_tokens,
            "top_p": config.rollout.top_p,
            "temperature": config.rollout.temperature,
            "name": "vllm",
            "adapter": adapter if adapter is not None and adapter.fits_engine else None,
            "demand": demand(config),
        }
        group = self.group(
            "vllm",
            "vlmrl.rollout.engine.RolloutEngine",
            settings,
            timeout_s=max(config.vllm.start_timeout_s, config.train.timeout_s),
            concurrent=True,
        )
        engines = RemoteEngines(
            group,
            timeout_s=config.vllm.generate_timeout_s,
            sleeps=config.vllm.enable_sleep,
            on_progress=report.generated,
            device_path=None if config.vllm.sync_backend == "shm" else DevicePath(group, config.vllm),
        )
        self.stack.callback(engines.shutdown)
        report.say(described(engines.status()[0]["limits"]))
        return engines

    def players(
        self,
        config: RlConfig,
        tools: Processor,
        *,
        adapter: AdapterPlan | None,
        critics: AdapterPlan | None,
        num_rows: int,
        report: Progress,
    ) -> Players:
        """All roles that samples go through, joined; nothing is published yet. `critics` is the critic's adapter."""
        starts: list[Callable[[], Any]] = [
            lambda: self.engines(config, report, adapter),
            lambda: self.learners(config, tools, adapter=adapter, critics=critics, num_rows=num_rows, say=report.say),
            lambda: self.rewarder(config, report.say),
            lambda: self.reward_models(config),
        ]
        # Side by side: each spends most of its start waiting for imports and files. But vLLM takes for its own what
        # others load onto its GPUs while it measures what is free there.
        shares_gpus = self.machines.has_gpus and any("vllm" in pool for pool in config.pools)
        first = [starts.pop(0)()] if shares_gpus else []
        engines, learners, rewarder, models = [*first, *run_parallel(*starts)]
        learners.policy.engines = engines
        engines.neighbours = [
            self.groups[name]
            for pool in config.pools
            for name in sorted(pool - {"vllm"})
            if "vllm" in pool and name in self.groups
        ]
        judges = Judges(rewarder, [model.over(learners.ranks) for model in models])
        return Players(engines, learners.policy, learners.reference, learners.critic, judges)

    def learners(
        self,
        config: RlConfig | SftConfig,
        tools: Processor,
        *,
        adapter: AdapterPlan | None,
        critics: AdapterPlan | None = None,
        num_rows: int,
        say: Callable[[str], None],
    ) -> Learners:
        """The policy; the critic, when the estimator has one; the reference, when a KL penalty wants one."""
        loop, is_rl = config.train, isinstance(config, RlConfig)
        critic = critic_settings(config, critics, num_rows) if isinstance(config, RlConfig) else {}
        group, critic_group, reference_group = run_parallel(
            lambda: self._actor(config, critic, adapter=adapter, num_rows=num_rows),
            lambda: self._critic(config, critic),
            lambda: self._reference(config),
        )
        ranks = Ranks(
            group,
            cut_of(group, loop, tools, say),
            max_tokens=(config.rollout.max_tokens_per_gpu if isinstance(config, RlConfig) else None)
            or loop.max_tokens_per_gpu,
            tally=Tally(),
        )
        steps = Steps(loop.batch_size, epochs=loop.max_epochs if is_rl else 1, seed=loop.seed)
        how = publication(
            adapter,
            ds=config.ds,
            vllm=config.vllm if isinstance(config, RlConfig) else Vllm(),
            vision_trains=vision_trains(config.actor, adapter),
        )
        policy = RemotePolicy(ranks, steps, how)
        if not isinstance(config, RlConfig):
            return Learners(ranks, policy, None, None)
        return Learners(
            ranks,
            policy,
            reference_over(config, ranks, reference_group, say) if config.algo.kl.init_coef > 0 else None,
            critic_over(ranks, critic_group, steps, say) if config.has_critic else None,
        )

    def _actor(
        self, config: RlConfig | SftConfig, critic: Mapping[str, Any], *, adapter: AdapterPlan | None, num_rows: int
    ) -> WorkerGroup:
        """The policy's ranks, with the critic in them where both share processes."""
        path = "vlmrl.learning.policy.Policy"
        frozen = max(0, config.critic.freezing_steps) if isinstance(config, RlConfig) and config.has_critic else 0
        settings = model_settings(config) | {
            "total_steps": optimizer_steps(config, num_rows, frozen=frozen),
            "loss": policy_loss(config) if isinstance(config, RlConfig) else None,
            "adapter": adapter,
            "ema_beta": config.train.ema_beta if isinstance(config, RlConfig) and config.train.enable_ema else None,
        }
        if isinstance(config, RlConfig) and config.critic_is_with_actor:
            path = "vlmrl.learning.policy_and_critic.PolicyAndCritic"
            settings = {"policy": settings, "critic": critic}
        return self.group("actor", path, settings, timeout_s=config.train.timeout_s, distributed=True)

    def _critic(self, config: RlConfig | SftConfig, settings: Mapping[str, Any]) -> WorkerGroup | None:
        """The critic's ranks; None without one, and where it is with the actor."""
        if not isinstance(config, RlConfig) or not config.has_critic or config.critic_is_with_actor:
            return None
        path = "vlmrl.learning.critic.Critic"
        return self.group("critic", path, settings, timeout_s=config.train.timeout_s, distributed=True)

    def _reference(self, config: RlConfig | SftConfig) -> WorkerGroup | None:
        """The ranks of a reference model; None without one, and where the policy is it, with its adapters off."""
        if not isinstance(config, RlConfig) or not config.has_reference:
            return None
        path = config.ref.model_name_or_path or config.actor.model_name_or_path
        return self.group(
            "ref",
            "vlmrl.learning.reference.Reference",
            model_settings(config) | {"actor": config.actor.model_copy(update={"model_name_or_path": path})},
            timeout_s=config.train.timeout_s,
            distributed=True,
        )

    def reward_models(self, config: RlConfig) -> list[JudgeRanks]:
        """Models that score answers, or the steps of answers."""
        reward = config.reward
        shared = {
            "actor": config.actor,
            "ds": config.ds,
            "loop": config.train,
            "columns": config.data,
            "vision": config.vision,
            "offload": reward.offload,
        }
        answers = {
            "path": reward.model_name_or_path,
            "flag": "reward.model_name_or_path",
            "normalize": reward.normalize_enable,
        }
        steps = {
            "path": reward.process_model_name_or_path,
            "flag": "reward.process_model_name_or_path",
            "separator": reward.process_separator,
        }
        wanted = [
            (role, name, own, weight)
            for role, name, own, weight in (
                (REWARD_MODELS[0], "model", answers, reward.model_weight),
                (REWARD_MODELS[1], "process", steps, reward.process_weight),
            )
            if own["path"] is not None
        ]
        path, timeout_s = "vlmrl.learning.reward_model.RewardModel", config.train.timeout_s
        groups = run_parallel(
            *(
                partial(self.group, role, path, shared | own, timeout_s=timeout_s, distributed=True)
                for role, _, own, _ in wanted
            )
        )
        return [
            JudgeRanks(group, name, weight, own is steps)
            for group, (_, name, own, weight) in zip(groups, wanted, strict=True)
        ]


class JudgeRanks(NamedTuple):
    """A reward model's ranks, before it is known how samples are cut."""

    group: WorkerGroup
    name: str
    weight: float
    is_process: bool

    def over(self, actor: Ranks) -> RewardModel:
        """The same, asked with the actor's packs."""
        return RewardModel(self.name, replace(actor, group=self.group), self.weight, is_process=self.is_process)


class Learners(NamedTuple):
    """Models over ranks."""

    ranks: Ranks
    """The policy's."""
    policy: RemotePolicy
    reference: RemoteReference | None
    critic: RemoteCritic | None


class Players(NamedTuple):
    """All roles that a step's samples go through."""

    engines: RemoteEngines
    policy: RemotePolicy
    reference: RemoteReference | None
    critic: RemoteCritic | None
    judges: Judges


def critic_over(actor: Ranks, group: WorkerGroup | None, steps: Steps, say: Callable[[str], None]) -> RemoteCritic:
    """The critic over ranks of its own, or with None over the actor's."""
    if group is not None:
        return RemoteCritic(replace(actor, group=group), steps)
    if actor.group.call("shares_features")[0]:
        say("critic: in the actor's processes, with the actor's features of images")
    return RemoteCritic(actor, steps)


def reference_over(
    config: RlConfig, actor: Ranks, group: WorkerGroup | None, say: Callable[[str], None]
) -> RemoteReference:
    """The reference over ranks of its own, or with None over the actor's, adapters off."""
    if group is not None:
        return RemoteReference(replace(actor, group=group))
    without = config.actor.adapter_name_or_path
    base = f"{config.actor.model_name_or_path}{f' without {without}' if without else ''}"
    say(f"reference: the policy with its adapters off, which is {base}")
    return RemoteReference(actor, adapter=False)


def cut_of(ranks: WorkerGroup, loop: Loop, tools: Processor, say: Callable[[str], None]) -> Cut:
    """How samples become packs, from what the policy's ranks tell of their model."""
    patch_cost, is_recurrent = ranks.call("traits")[0]
    if tools.resize_factor is not None:
        say(f"a vision patch costs as much as {patch_cost:.2f} language tokens")
    if is_recurrent and loop.layout != "padded":
        say(f"train.layout padded instead of {loop.layout}: recurrent layers would mix the samples of a pack")
    return Cut(
        layout="padded" if is_recurrent else loop.layout,
        max_tokens=loop.max_tokens_per_gpu,
        max_samples=loop.micro_batch_size,
        image_cost=lambda image: patch_cost * math.prod(tools.grid(image.size)),
        filler=tools.dummy_sample(),
    )
