"""Puts roles on machines: which class runs as which role, with which settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.losses import PolicyLoss
from vlmrl.cluster.device_path import DevicePath
from vlmrl.cluster.group import WorkerGroup
from vlmrl.cluster.learners import Cut, Ranks, RemoteCritic, RemotePolicy, RemoteReference, Steps, Tally
from vlmrl.cluster.placement import Place
from vlmrl.cluster.publish import publication
from vlmrl.cluster.roles import RemoteEngines, RemotePrompts
from vlmrl.cluster.scoring import Judges, RemoteRewarder, RewardModel
from vlmrl.cluster.session import Session
from vlmrl.config.base import names_function
from vlmrl.config.role_checks import REWARD_MODELS
from vlmrl.config.run import EvalConfig, RlConfig, RolloutBench, SftConfig
from vlmrl.config.train import Loop
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, vision_trains
from vlmrl.plugins import Processor
from vlmrl.rewards.http import read_token
from vlmrl.together import together


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

    def group(self, name: str, path: str, settings: Mapping[str, Any], *, timeout_s: float, **how: bool) -> WorkerGroup:
        group = WorkerGroup(
            name,
            path,
            settings,
            session=self.machines,
            places=self.places.get(name, [Place(0, ())]),
            timeout_s=timeout_s,
            **how,
        )
        self.stack.callback(group.shutdown)
        return group

    def prompts(
        self, config: RlConfig | SftConfig | EvalConfig | RolloutBench, say: Callable[[str], None] = print
    ) -> RemotePrompts:
        settings = {
            "model": config.actor.model_name_or_path,
            "trust_remote_code": config.actor.trust_remote_code,
            "data": config.data,
            "evaluation": getattr(config, "eval", None),
            "seed": config.train.seed,
        }
        group = self.group("data", "vlmrl.cluster.store.StoredSource", settings, timeout_s=config.train.timeout_s)
        return RemotePrompts(group, say=say)

    def rewarder(self, config: RlConfig | EvalConfig) -> RemoteRewarder | None:
        """Reward functions and servers; None when models alone say what answers are worth."""
        reward = config.reward
        if not reward.functions and reward.remote_url is None:
            return None
        if reward.user_function is not None:
            # The worker stands in another folder than the user does.
            reward = reward.model_copy(update={"remote_url": absolute(reward.user_function)})
        settings = {"reward": reward, "token": read_token()}
        rewarder = RemoteRewarder(
            self.group("reward", "vlmrl.rewards.combine.Rewarder", settings, timeout_s=config.train.timeout_s)
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
            "name": "vllm",
            "adapter": adapter if adapter is not None and adapter.fits_engine else None,
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
        # They start at the same time: each spends most of its start waiting for imports and files.
        engines, learners = together(
            lambda: self.engines(config, report, adapter),
            lambda: self.learners(config, tools, adapter=adapter, critics=critics, num_rows=num_rows, say=report.say),
        )
        learners.policy.engines = engines
        judges = Judges(self.rewarder(config), self.reward_models(config, learners.ranks))
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
        group = self._actor(config, critic, adapter=adapter, num_rows=num_rows)
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
            self._reference(config, ranks, say) if config.algo.kl.init_coef > 0 else None,
            self._critic(config, critic, ranks, steps, say) if config.has_critic else None,
        )

    def _actor(
        self, config: RlConfig | SftConfig, critic: Mapping[str, Any], *, adapter: AdapterPlan | None, num_rows: int
    ) -> WorkerGroup:
        """The policy's ranks, with the critic in them where both share processes."""
        path = "vlmrl.learning.policy.Policy"
        settings = model_settings(config) | {
            "total_steps": optimizer_steps(config, num_rows),
            "loss": policy_loss(config) if isinstance(config, RlConfig) else None,
            "adapter": adapter,
            "ema_beta": config.train.ema_beta if isinstance(config, RlConfig) and config.train.enable_ema else None,
        }
        if isinstance(config, RlConfig) and config.critic_is_with_actor:
            path = "vlmrl.learning.pair.PolicyAndCritic"
            settings = {"policy": settings, "critic": critic}
        return self.group("actor", path, settings, timeout_s=config.train.timeout_s, distributed=True)

    def _critic(
        self,
        config: RlConfig,
        settings: Mapping[str, Any],
        actor: Ranks,
        steps: Steps,
        say: Callable[[str], None],
    ) -> RemoteCritic:
        if config.critic_is_with_actor:
            if actor.group.call("shares_features")[0]:
                say("critic: in the actor's processes, with the actor's features of images")
            return RemoteCritic(actor, steps)
        group = self.group(
            "critic",
            "vlmrl.learning.critic.Critic",
            settings,
            timeout_s=config.train.timeout_s,
            distributed=True,
        )
        return RemoteCritic(replace(actor, group=group), steps)

    def _reference(self, config: RlConfig, actor: Ranks, say: Callable[[str], None]) -> RemoteReference:
        if config.reference_is_base:
            without = config.actor.adapter_name_or_path
            say(
                f"reference: the policy with its adapters off, which is {config.actor.model_name_or_path}"
                f"{f' without {without}' if without else ''}"
            )
            return RemoteReference(actor, adapter=False)
        path = config.ref.model_name_or_path or config.actor.model_name_or_path
        group = self.group(
            "ref",
            "vlmrl.learning.reference.Reference",
            model_settings(config) | {"actor": config.actor.model_copy(update={"model_name_or_path": path})},
            timeout_s=config.train.timeout_s,
            distributed=True,
        )
        return RemoteReference(replace(actor, group=group))

    def reward_models(self, config: RlConfig, actor: Ranks) -> list[RewardModel]:
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
        found = []
        for role, name, own, weight in (
            (REWARD_MODELS[0], "model", answers, reward.model_weight),
            (REWARD_MODELS[1], "process", steps, reward.process_weight),
        ):
            if own["path"] is not None:
                group = self.group(
                    role,
                    "vlmrl.learning.reward_model.RewardModel",
                    shared | own,
                    timeout_s=config.train.timeout_s,
                    distributed=True,
                )
                found.append(RewardModel(name, replace(actor, group=group), weight, is_process=own is steps))
        return found


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


def model_settings(config: RlConfig | SftConfig) -> dict[str, Any]:
    """What policy and reference are made of, so that both are asked the same question."""
    return {
        "actor": config.actor,
        "ds": config.ds,
        "loop": config.train,
        "columns": config.data,
        "vision": config.vision,
        "temperature": config.rollout.temperature if isinstance(config, RlConfig) else 1.0,
        "bans": isinstance(config, RlConfig) and config.rollout.top_p == 1.0,
    }


def critic_settings(config: RlConfig, adapter: AdapterPlan | None, num_rows: int) -> dict[str, Any]:
    """What the critic is made of."""
    return {
        "critic": config.whole_critic,
        "adapter": adapter,
        "ds": config.ds,
        "loop": config.train,
        "columns": config.data,
        "vision": config.vision,
        "total_steps": optimizer_steps(config, num_rows),
    }


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


def optimizer_steps(config: RlConfig | SftConfig, num_rows: int) -> int:
    """Optimizer steps of the whole run: what the learning rate's schedule is laid over."""
    steps = last_step(config, num_rows)
    if isinstance(config, SftConfig):
        return steps
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return steps * config.train.max_epochs * -(-samples // config.train.batch_size)


def policy_loss(config: RlConfig) -> PolicyLoss:
    """The loss that the settings ask for."""
    actor, advantage, kl = config.actor, config.algo.advantage, config.algo.kl
    low, high = actor.clip_range
    correction = Correction(advantage.is_correction_type, *advantage.is_correction_threshold)
    return PolicyLoss(
        # Ranks stand in another folder than the user does.
        kind=absolute(actor.policy_loss_type) if names_function(actor.policy_loss_type) else actor.policy_loss_type,
        clip_low=low,
        clip_high=high,
        dual_clip=actor.dual_clip,
        kl_estimator=kl.estimator,
        kl_early_stop=kl.early_stop,
        entropy_coef=actor.entropy_coef,
        correction=correction if advantage.is_correction_enable else None,
        aggregation=config.aggregation,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def absolute(spec: str) -> str:
    """`path/to/file.py:function` wherever a process stands."""
    return str(Path(spec).expanduser().absolute())


def last_step(config: RlConfig | SftConfig, num_rows: int) -> int:
    """Steps of the whole run.

    Raises:
        ConfigError: the data are not enough for one step.
    """
    if isinstance(config, RlConfig):
        size, passes, flag = config.rollout.batch_size, config.train.num_episodes, "--rollout.batch_size"
    else:
        size, passes, flag = config.train.batch_size, config.train.max_epochs, "--train.batch_size"
    steps = num_rows * passes // size
    if steps == 0:
        raise ConfigError(f"{num_rows} rows, {passes} times over, do not fill one batch of {size}: lower {flag}")
    return min(steps, config.train.max_steps or steps)
