"""Puts roles on machines: which class runs as which role, with which settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vlmrl.algorithms.losses import PolicyLoss
from vlmrl.cluster.device_path import DevicePath
from vlmrl.cluster.group import WorkerGroup
from vlmrl.cluster.placement import Place
from vlmrl.cluster.publish import publication
from vlmrl.cluster.roles import Cut, RemoteEngines, RemotePolicy, RemotePrompts, RemoteReference, RemoteRewarder, Tally
from vlmrl.cluster.session import Session
from vlmrl.config.run import EvalConfig, RlConfig, RolloutBench, SftConfig
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, vision_trains
from vlmrl.plugins import Processor


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

    def group(self, name: str, path: str, settings: dict[str, Any], *, timeout_s: float, **how: bool) -> WorkerGroup:
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

    def rewarder(self, config: RlConfig | EvalConfig) -> RemoteRewarder:
        # The worker stands in another folder than the user does.
        reward = config.reward
        if reward.remote_url is not None:
            reward = reward.model_copy(update={"remote_url": str(Path(reward.remote_url).expanduser().absolute())})
        settings = {"reward": reward}
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
        num_rows: int,
        report: Progress,
    ) -> tuple[RemoteEngines, RemotePolicy, RemoteReference | None]:
        """Engines, policy and reference, joined; nothing is published yet."""
        # They start at the same time: each spends most of its start waiting for imports and files.
        engines, (policy, reference) = together(
            lambda: self.engines(config, report, adapter),
            lambda: self.learners(config, tools, adapter=adapter, num_rows=num_rows, say=report.say),
        )
        policy.engines = engines
        return engines, policy, reference

    def learners(
        self,
        config: RlConfig | SftConfig,
        tools: Processor,
        *,
        adapter: AdapterPlan | None,
        num_rows: int,
        say: Callable[[str], None],
    ) -> tuple[RemotePolicy, RemoteReference | None]:
        """The policy, and the reference when a KL penalty wants one."""
        loop, is_rl = config.train, isinstance(config, RlConfig)
        shared = {
            "actor": config.actor,
            "ds": config.ds,
            "loop": loop,
            "columns": config.data,
            "vision": config.vision,
            "temperature": config.rollout.temperature if isinstance(config, RlConfig) else 1.0,
            "bans": isinstance(config, RlConfig) and config.rollout.top_p == 1.0,
        }
        without_gradient = (
            config.rollout.max_tokens_per_gpu if isinstance(config, RlConfig) else None
        ) or loop.max_tokens_per_gpu
        learner = {
            "total_steps": optimizer_steps(config, num_rows),
            "loss": policy_loss(config) if isinstance(config, RlConfig) else None,
            "adapter": adapter,
        }
        ranks = self.group(
            "actor", "vlmrl.learning.policy.Policy", shared | learner, timeout_s=loop.timeout_s, distributed=True
        )
        patch_cost, is_recurrent = ranks.call("traits")[0]
        if tools.resize_factor is not None:
            say(f"a vision patch costs as much as {patch_cost:.2f} language tokens")
        if is_recurrent and loop.layout != "padded":
            say(f"train.layout padded instead of {loop.layout}: recurrent layers would mix the samples of a pack")
        cut = Cut(
            layout="padded" if is_recurrent else loop.layout,
            max_tokens=loop.max_tokens_per_gpu,
            max_samples=loop.micro_batch_size,
            image_cost=lambda image: patch_cost * math.prod(tools.grid(image.size)),
            filler=tools.dummy_sample(),
        )
        tally = Tally()
        policy = RemotePolicy(
            ranks,
            cut,
            max_tokens=without_gradient,
            tally=tally,
            batch_size=loop.batch_size,
            epochs=loop.max_epochs if is_rl else 1,
            seed=loop.seed,
            publication=publication(
                adapter,
                ds=config.ds,
                vllm=config.vllm if isinstance(config, RlConfig) else Vllm(),
                vision_trains=vision_trains(config.actor, adapter),
            ),
        )
        if not isinstance(config, RlConfig) or config.algo.kl.init_coef == 0:
            return policy, None
        if config.reference_is_base:
            without = config.actor.adapter_name_or_path
            say(
                f"reference: the policy with its adapters off, which is {config.actor.model_name_or_path}"
                f"{f' without {without}' if without else ''}"
            )
            return policy, RemoteReference(ranks, cut, max_tokens=without_gradient, tally=tally, adapter=False)
        path = config.ref.model_name_or_path or config.actor.model_name_or_path
        reference = self.group(
            "ref",
            "vlmrl.learning.reference.Reference",
            shared | {"actor": config.actor.model_copy(update={"model_name_or_path": path})},
            timeout_s=loop.timeout_s,
            distributed=True,
        )
        return policy, RemoteReference(reference, cut, max_tokens=without_gradient, tally=tally)


def together(*starts: Callable[[], Any]) -> list[Any]:
    """Run the starts side by side and return what they made, in order. Raises the first error once all have ended."""
    with ThreadPoolExecutor(len(starts)) as pool:
        futures = [pool.submit(start) for start in starts]
    return [future.result() for future in futures]


def optimizer_steps(config: RlConfig | SftConfig, num_rows: int) -> int:
    """Optimizer steps of the whole run: what the learning rate's schedule is laid over."""
    steps = last_step(config, num_rows)
    if isinstance(config, SftConfig):
        return steps
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return steps * config.train.max_epochs * -(-samples // config.train.batch_size)


def policy_loss(config: RlConfig) -> PolicyLoss:
    """The loss that the settings ask for."""
    low, high = config.actor.eps_clip_low_high or (config.actor.eps_clip, config.actor.eps_clip)
    return PolicyLoss(
        clip_low=low,
        clip_high=high,
        dual_clip=config.actor.dual_clip,
        kl_coef=config.algo.kl.init_coef if config.algo.kl.use_loss else 0.0,
        kl_estimator=config.algo.kl.estimator,
        aggregation=config.algo.aggregation,
        max_new_tokens=config.rollout.max_new_tokens,
    )


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
