"""The settings of each verb, composed of sections, and the checks that cross sections."""

from typing import Any, ClassVar, Self

from pydantic import model_validator

from vlmrl.config import adapters, agent, algo, data, distill, gateway, generate, reward, roles, rollout, train, videos
from vlmrl.config.actor import Actor, Model, Ref
from vlmrl.config.agent import Agent
from vlmrl.config.algo import Algo
from vlmrl.config.base import Unread
from vlmrl.config.built_in import Aggregation
from vlmrl.config.ckpt import Ckpt, Logger
from vlmrl.config.critic import Critic
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.gateway import Gateway
from vlmrl.config.generate import Generate, GenerateData, GenerateRollout
from vlmrl.config.merge import Merge
from vlmrl.config.names import all_but, is_given, settings
from vlmrl.config.reward import SHAPING, Reward
from vlmrl.config.rollout import Eval, EvalOnly, Rollout
from vlmrl.config.train import EvalLoop, TrainRl
from vlmrl.config.training import AgentConfig, TrainingConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.vllm import Vllm

CHECKPOINT = ("model_name_or_path", "trust_remote_code")
COMMON = ("seed", "timeout_s", "wait_nodes_s", "stop_grace_s")
SYNC = ("bucket_mib", "sync_backend", "readback_steps")
WITH_TRAINER = ("max_logprob_diff", "enable_sleep", "quantization")


class RlConfig(TrainingConfig, AgentConfig):
    """Reinforcement learning: sample responses, score them, learn from the better ones."""

    verb: ClassVar[str] = "rl"
    omits: ClassVar[frozenset[str]] = frozenset({"data.output_key"})

    actor: Actor
    agent: Agent = Agent()
    gateway: Gateway = Gateway()
    critic: Critic = Critic()
    ref: Ref = Ref()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    algo: Algo = Algo()
    train: TrainRl = TrainRl()
    eval: Eval = Eval()
    logger: Logger = Logger()

    def unread(self) -> Unread:
        return (
            super().unread()
            | agent.unread_of_agent(has_agent=self.has_agent)
            | gateway.unread_of_gateway(has_agent=self.has_agent)
            | algo.unread_of_loss(self.actor)
            | algo.unread_of_advantage(self.algo.advantage)
            | algo.unread_of_filtering(self.algo)
            | algo.unread_of_updates(self.rollout, self.train)
            | reward.unread_of_sources(self.reward)
            | reward.unread_of_models(self.reward)
            | reward.unread_of_shaping(self.reward, has_agent=self.has_agent)
            | train.unread_of_async(self.train)
            | roles.unread_of_average(self.train)
            | roles.unread_of_best(evaluates=self.evaluates)
            | roles.unread_of_sharing(self.train, has_reward_model=self.reward.has_model)
            | roles.unread_of_critic(
                self.critic,
                estimator=self.algo.advantage.estimator,
                exists=self.has_critic,
                is_with_actor=self.critic_is_with_actor,
            )
            | algo.unread_of_kl(self.algo)
            | distill.unread_of_distill(self.algo.distill)
            | (algo.unread_of_estimator(self.algo, self.actor) if self._teaches_alone else {})
            | rollout.unread_of_eval(self.eval, holds_out=self.data.eval_fraction > 0)
            | adapters.unread_of_engine_base(self.vllm, self.ds)
            | (adapters.unread_of_adapter_reference() if self.reference_is_base else {})
        )

    @property
    def evaluates(self) -> bool:
        """The run has held-out prompts."""
        return self.eval.dataset is not None or self.data.eval_fraction > 0

    @property
    def aggregation(self) -> Aggregation:
        """`algo.loss_agg`, by default that of the loss's paper, else that of the estimator's."""
        loss, estimator = self.actor.built_in_loss, self.algo.advantage.built_in
        loss_default = None if loss is None else loss.aggregation
        return self.algo.loss_agg or loss_default or ("token" if estimator is None else estimator.aggregation)

    @property
    def has_critic(self) -> bool:
        """The run trains a critic: the estimator needs one, or it is the user's and the user gives a critic."""
        estimator = self.algo.advantage.built_in
        return self.critic.model_name_or_path is not None if estimator is None else estimator.needs_critic

    @property
    def critic_is_with_actor(self) -> bool:
        """The critic lives in the actor's processes."""
        return self.has_critic and (self.train.colocate_actor_critic or self.train.colocate_all)

    @property
    def resolved_critic(self) -> Critic:
        """The critic's settings with all defaults filled in."""
        actor, critic = self.actor, self.critic
        initial = critic.model_name_or_path or self.reward.model_name_or_path or actor.model_name_or_path
        shared = ("gradient_checkpointing_enable", "freeze_visual_encoder", "freeze_projector")
        filled: dict[str, Any] = {name: getattr(actor, name) for name in shared if getattr(critic, name) is None}
        filled |= {"model_name_or_path": initial}
        if critic.zero_stage is None:
            filled |= {"zero_stage": self.ds.zero_stage}
        if self.critic_is_with_actor:
            filled |= {"num_nodes": actor.num_nodes, "num_gpus_per_node": actor.num_gpus_per_node}
        return critic.model_copy(update=filled)

    @property
    def has_other_frozen_tower(self) -> bool:
        critic_is_frozen = self.has_critic and adapters.freezes_vision(self.resolved_critic.as_model, self.ds.lora)
        return self.has_reference or self.has_teacher or self.reward.has_model or critic_is_frozen

    @property
    def has_reference(self) -> bool:
        """The run has a separate reference model."""
        return self.algo.kl.init_coef > 0 and not self.reference_is_base

    @property
    def reference_is_base(self) -> bool:
        """The reference is the actor with its adapters off, not a separate model."""
        return self.algo.kl.init_coef > 0 and self.ds.lora.rank > 0 and self.ref.model_name_or_path is None

    @property
    def has_teacher(self) -> bool:
        """A teacher grades the sampled tokens (on-policy distillation)."""
        return self.algo.distill.teacher_model_name_or_path is not None

    @property
    def rewards_vary(self) -> bool:
        """Something but a teacher rewards the responses."""
        return reward.rewards_vary(self.reward, has_agent=self.has_agent)

    @property
    def scores_responses(self) -> bool:
        """Responses have scores, if only to measure them."""
        return self.rewards_vary or reward.has_source(self.reward, has_agent=self.has_agent)

    @property
    def needs_one_pass(self) -> bool:
        """The update computes the old log-probs, so they need no pass of their own."""
        return algo.needs_one_pass(self.rollout, self.train, self.algo)

    @property
    def loss_reads_responses(self) -> bool:
        """The loss of a token may depend on all of its response."""
        return algo.loss_reads_responses(self.actor, self.algo.advantage)

    @property
    def _zero_stages(self) -> dict[str, tuple[int | None, str]]:
        if not self.has_critic:
            return super()._zero_stages
        return super()._zero_stages | {"critic.zero_stage": (self.resolved_critic.zero_stage, self.critic.optim)}

    @property
    def _num_ranks(self) -> dict[str, int]:
        critic = self.critic
        if not self.has_critic or self.critic_is_with_actor:
            return super()._num_ranks
        of_critic = {"critic.num_nodes x critic.num_gpus_per_node": critic.num_nodes * critic.num_gpus_per_node}
        return super()._num_ranks | of_critic

    @property
    def pools(self) -> list[frozenset[str]]:
        return roles.pools(self.train, critic_is_with_actor=self.critic_is_with_actor)

    def conflicts(self) -> list[str]:
        return [
            *agent.conflicts_of_agent(self.agent, self.rollout, max_len=self.data.max_len, has_agent=self.has_agent),
            *videos.conflicts_of_videos(self.data, has_agent=self.has_agent, reward=self.reward, vllm=self.vllm),
            *algo.conflicts_of_batch(self.rollout, self.train, self.algo, rewards_vary=self._estimator_has_input),
            *algo.conflicts_of_replay(self.algo, self.vllm, is_async=self.train.async_enable, has_agent=self.has_agent),
            *algo.conflicts_of_correction(self.actor, self.algo.advantage),
            *(() if self.has_teacher else reward.conflicts_of_no_source(self.reward, has_agent=self.has_agent)),
            *(self._conflicts_of_teacher() if self.has_teacher else ()),
            *reward.conflicts_of_sampling(self.rollout, self.reward),
            *reward.conflicts_of_sources(self.reward),
            *rollout.conflicts_of_eval(self.eval, evaluates=self.evaluates),
            *roles.conflicts_of_async(self.train, self.vllm, self.ds, self.algo.advantage),
            *roles.conflicts_of_devices(self.vllm, self.train),
            *roles.conflicts_of_quantization(self.vllm, self.ds, self.algo.advantage),
            *roles.conflicts_of_sleep(self.ds, self.train, self._zero_stages),
            *roles.conflicts_of_best(self.ckpt, self.eval, evaluates=self.evaluates),
            *(roles.conflicts_of_critic(self.critic, self.train, self.ds) if self.has_critic else ()),
            *adapters.conflicts_of_dropout(self.ds.lora, needs_one_pass=self.needs_one_pass),
            *super().conflicts(),
        ]

    def _conflicts_of_teacher(self) -> list[str]:
        return distill.conflicts_of_distill(
            filters=self.algo.dynamic_filtering_enable,
            rewards_vary=self._estimator_has_input,
            critic_of=self.algo.advantage.estimator if self.has_critic else None,
            can_check=reward.has_source(self.reward, has_agent=self.has_agent),
            evaluates=self.evaluates,
        )

    @property
    def _teaches_alone(self) -> bool:
        """Only a teacher grades the responses."""
        return self.has_teacher and not self._estimator_has_input

    @property
    def _estimator_has_input(self) -> bool:
        """Rewards, or a KL penalty in them, reach the estimator."""
        kl = self.algo.kl
        return self.rewards_vary or (kl.init_coef > 0 and not kl.use_loss)

    def resolve(self) -> None:
        """Drop the default reward functions where a teacher grades the responses and the user names none."""
        if self.has_teacher and not is_given(self.reward, "functions"):
            # The settings are frozen, and a validator is still constructing them.
            self.__dict__["reward"] = self.reward.model_copy(update={"functions": {}})


class EvalConfig(AgentConfig):
    """Evaluation: sample responses to held-out prompts and score them."""

    verb: ClassVar[str] = "eval"
    omits: ClassVar[frozenset[str]] = (
        all_but(Model, "actor", *CHECKPOINT, "adapter_name_or_path")
        | frozenset({"data.output_key"})
        | all_but(Rollout, "rollout", "max_new_tokens")
        | frozenset(f"vllm.{name}" for name in (*SYNC, "max_logprob_diff", "qlora_base", "quantization"))
        | frozenset(f"reward.{name}" for name in SHAPING)
        | all_but(EvalLoop, "train", *COMMON, "agent_func_path", "max_tokens_per_gpu", "colocate_all")
        | all_but(Ds, "ds", "param_dtype", "zero_stage")
        | all_but(Ckpt, "ckpt", "output_dir")
    )

    actor: Model
    agent: Agent = Agent()
    gateway: Gateway = Gateway()
    eval: EvalOnly
    data: Columns = Columns()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    train: EvalLoop = EvalLoop()
    ds: Ds = Ds()
    ckpt: Ckpt = Ckpt()

    def unread(self) -> Unread:
        return (
            agent.unread_of_agent(has_agent=self.has_agent)
            | gateway.unread_of_gateway(has_agent=self.has_agent)
            | data.unread_of_columns(self.data)
            | reward.unread_of_sources(self.reward)
            | reward.unread_of_models_in_evaluation(self.reward)
        )

    def conflicts(self) -> list[str]:
        return [
            *agent.conflicts_of_agent(self.agent, self.rollout, max_len=self.data.max_len, has_agent=self.has_agent),
            *videos.conflicts_of_videos(self.data, has_agent=self.has_agent, reward=self.reward, vllm=self.vllm),
            *reward.conflicts_of_no_source(self.reward, has_agent=self.has_agent),
            *reward.conflicts_of_sources(self.reward),
            *roles.conflicts_of_devices(self.vllm, self.train),
            *rollout.conflicts_of_eval(self.eval),
        ]

    @property
    def pools(self) -> list[frozenset[str]]:
        """Sets of roles that share devices and use them in turn."""
        return roles.pools_of_evaluation(self.train)


class GenerateConfig(EvalConfig):
    """Batch generation: sample responses to the rows of a dataset, and write them as rows for other verbs.

    It samples and scores the responses to all rows, in their order.
    """

    verb: ClassVar[str] = "generate"
    omits: ClassVar[frozenset[str]] = (
        (EvalConfig.omits - settings(Rollout, "rollout.").keys())
        | frozenset({"rollout.max_tokens_per_gpu", "train.agent_func_path"})
        | settings(EvalOnly, "eval.").keys()
        | settings(Agent, "agent.").keys()
        | settings(Gateway, "gateway.").keys()
    )

    data: GenerateData
    generate: Generate = Generate()
    rollout: GenerateRollout = GenerateRollout()
    eval: EvalOnly = EvalOnly.model_construct(set(), dataset="")  # not given: see `resolve_rows`

    def unread(self) -> Unread:
        return (
            data.unread_of_columns(self.data)
            | reward.unread_of_sources(self.reward)
            | reward.unread_of_models_in_evaluation(self.reward)
            | generate.unread_of_generate(self.generate, self.rollout)
        )

    def conflicts(self) -> list[str]:
        return [
            *generate.conflicts_of_generate(self.generate, self.rollout, self.reward),
            *generate.conflicts_of_videos(self.data),
            *reward.conflicts_of_sources(self.reward),
            *roles.conflicts_of_devices(self.vllm, self.train),
        ]

    @property
    def keep(self) -> str:
        """`generate.keep` with its default filled in."""
        return generate.keep_of(self.generate, self.rollout)

    @property
    def has_scores(self) -> bool:
        """Responses are scored."""
        return reward.has_source(self.reward, has_agent=False)

    @model_validator(mode="after")
    def resolve_rows(self) -> Self:
        """Set the rows and the sampling of the evaluation that this is."""
        # The settings are frozen, and this validator is still constructing them.
        self.__dict__["eval"] = EvalOnly(
            dataset=self.data.prompt_dataset,
            split=self.data.prompt_split,
            max_samples=self.data.max_samples,
            temperature=self.rollout.temperature,
            n_samples_per_prompt=generate.num_responses(self.rollout),
        )
        return self

    def resolve(self) -> None:
        """Drop the default reward functions where rows are written without scores: the data need no labels then."""
        has_source = is_given(self.reward, "functions") or self.reward.has_user_source
        if self.keep == "all" and not has_source:
            self.__dict__["reward"] = self.reward.model_copy(update={"functions": {}})


class MergeConfig(VerbConfig):
    """Merge an adapter into its base model."""

    verb: ClassVar[str] = "merge"
    omits: ClassVar[frozenset[str]] = all_but(Ds, "ds", "param_dtype", "load_in_4bit")

    merge: Merge
    ds: Ds = Ds()
