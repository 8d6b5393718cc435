"""The settings of the verbs that learn from data, without sampling responses for it."""

from typing import ClassVar

from vlmrl.config import adapters, distill, dpo, reward, rm, roles, rollout, sampled_eval, sft, videos
from vlmrl.config.actor import Ref
from vlmrl.config.agent import Agent
from vlmrl.config.base import Unread
from vlmrl.config.dpo import Dpo
from vlmrl.config.gateway import Gateway
from vlmrl.config.names import all_but
from vlmrl.config.pairs import PairData
from vlmrl.config.reward import Reward, Scoring
from vlmrl.config.rm import RewardActor, Rm
from vlmrl.config.rollout import EvalOnly, EvalRows, Rollout
from vlmrl.config.sampled_eval import SampledEval
from vlmrl.config.sft import Sft, SftData
from vlmrl.config.train import EvalLoop, Loop, SampledLoop
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig
from vlmrl.config.vllm import Vllm

_ONLY_OF_RL = frozenset({"logger.rollouts", "logger.sample_steps", "ds.enable_sleep"})


class SupervisedConfig(TrainingConfig):
    """Training on the rows of a dataset: each row once per epoch, `train.batch_size` rows per optimizer step."""

    omits: ClassVar[frozenset[str]] = _ONLY_OF_RL

    eval: EvalRows = EvalRows()

    @property
    def evaluates(self) -> bool:
        """The run has held-out rows."""
        return self.eval.dataset is not None or self.data.eval_fraction > 0

    def unread(self) -> Unread:
        return (
            super().unread()
            | roles.unread_of_best(evaluates=self.evaluates)
            | rollout.unread_of_eval(self.eval, holds_out=self.data.eval_fraction > 0)
            | rollout.unread_of_patience(self.eval, best_metric_key=self.ckpt.best_metric_key)
        )

    def conflicts(self) -> list[str]:
        return [*roles.conflicts_of_best(self.ckpt, self.eval, evaluates=self.evaluates), *super().conflicts()]


class SamplingConfig(SupervisedConfig):
    """Such training of a policy, whose responses to held-out questions can be evaluated."""

    omits: ClassVar[frozenset[str]] = (
        _ONLY_OF_RL
        | all_but(Rollout, "rollout", "max_new_tokens")
        | frozenset({"vllm.max_logprob_diff", "vllm.quantization"})
    )

    eval: SampledEval = SampledEval()
    reward: Scoring = Scoring()
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    train: SampledLoop = SampledLoop()

    @property
    def pools(self) -> list[frozenset[str]]:
        return [frozenset({"actor", "vllm"})] if self.train.colocate_all else []

    @property
    def generation(self) -> EvalConfig | None:
        """Settings of the sampling of responses to held-out questions; None if none are sampled."""
        if not self.eval.generate_enable:
            return None
        of_eval = {name: getattr(self.eval, name) for name in EvalOnly.model_fields}
        # Not validated: settings that only training has, such as `ds.zero_stage`, are no mistake here.
        return EvalConfig.model_construct(
            actor=self.actor,
            agent=Agent(),
            gateway=Gateway(),
            eval=EvalOnly.model_construct(**of_eval),
            data=self.data,
            reward=Reward.model_construct(**{name: getattr(self.reward, name) for name in Scoring.model_fields}),
            rollout=self.rollout,
            vllm=self.vllm,
            train=EvalLoop.model_construct(**{name: getattr(self.train, name) for name in Loop.model_fields}),
            ds=self.ds,
            ckpt=self.ckpt,
        )

    def unread(self) -> Unread:
        generates = self.eval.generate_enable
        return (
            super().unread()
            | sampled_eval.unread_of_generation(self.eval)
            | (reward.unread_of_sources(self.reward) if generates else {})
            | (adapters.unread_of_engine_base(self.vllm, self.ds) if generates else {})
        )

    def conflicts(self) -> list[str]:
        return [
            *rollout.conflicts_of_eval(self.eval, evaluates=self.eval.generate_enable),
            *(reward.conflicts_of_no_source(self.reward) if self.eval.generate_enable else ()),
            *(roles.conflicts_of_devices(self.vllm, self.train) if self.eval.generate_enable else ()),
            *(
                videos.conflicts_of_videos(self.data, has_agent=False, reward=self.reward, vllm=self.vllm)
                if self.eval.generate_enable
                else ()
            ),
            *super().conflicts(),
        ]


class SftConfig(SamplingConfig):
    """Supervised fine-tuning on the responses of a dataset."""

    verb: ClassVar[str] = "sft"

    data: SftData
    sft: Sft = Sft()

    @property
    def has_other_frozen_tower(self) -> bool:
        return self.sft.teacher_model_name_or_path is not None

    def unread(self) -> Unread:
        return super().unread() | sft.unread_of_sft(self.sft) | distill.unread_of_sft_distill(self.sft)

    def conflicts(self) -> list[str]:
        return [
            *sft.conflicts_of_turns(self.data, self.sft),
            *sft.conflicts_of_generation(self.eval, self.sft),
            *distill.conflicts_of_sft_distill(
                self.sft.teacher_model_name_or_path, sequence_parallel_size=self.ds.sequence_parallel_size
            ),
            *super().conflicts(),
        ]


class RmConfig(SupervisedConfig):
    """Training of a reward model on preferences, or on labelled steps."""

    verb: ClassVar[str] = "rm"

    actor: RewardActor
    data: PairData
    rm: Rm = Rm()

    def unread(self) -> Unread:
        return super().unread() | rm.unread_of_rm(self.rm)


class DpoConfig(SamplingConfig):
    """Learning from preferences, without sampling: DPO, IPO, KTO, ORPO, SimPO, BCO, MPO."""

    verb: ClassVar[str] = "dpo"
    omits: ClassVar[frozenset[str]] = SamplingConfig.omits | {"data.margin_key"}

    data: PairData
    dpo: Dpo = Dpo()
    ref: Ref = Ref()

    def resolve(self) -> None:
        super().resolve()
        # The settings are frozen, and the validator that calls this is still constructing them.
        self.__dict__["dpo"] = dpo.with_beta_of_loss(self.dpo)

    @property
    def has_reference(self) -> bool:
        """The reference is a separate model, on devices of its own."""
        if not self.dpo.needs_reference:
            return False
        return self.ref.model_name_or_path is not None or not (self.reference_is_base or self.dpo.precompute_reference)

    @property
    def reference_is_base(self) -> bool:
        """The reference is the actor with its adapters off."""
        is_live = self.dpo.needs_reference and not self.dpo.precompute_reference
        return is_live and self.ds.lora.rank > 0 and self.ref.model_name_or_path is None

    @property
    def has_other_frozen_tower(self) -> bool:
        return self.has_reference

    def unread(self) -> Unread:
        return (
            super().unread()
            | dpo.unread_of_dpo(self.dpo)
            | dpo.unread_of_ref(self.dpo, has_reference=self.has_reference, is_base=self.reference_is_base)
        )

    def conflicts(self) -> list[str]:
        return [
            *dpo.conflicts_of_ref(self.dpo, model=self.ref.model_name_or_path),
            *dpo.conflicts_of_adapter(adapter=self.actor.adapter_name_or_path, is_base=self.reference_is_base),
            *dpo.conflicts_of_batch(self.dpo, batch_size=self.train.batch_size),
            *dpo.conflicts_of_dropout(self.dpo, self.ds.lora),
            *super().conflicts(),
        ]
