"""The settings of each verb, put together from sections, and the checks that cross sections."""

from typing import ClassVar, Self

from pydantic import model_validator
from pydantic.fields import FieldInfo

from vlmrl.config import adapter_checks, checks
from vlmrl.config.actor import Actor, Model, Ref
from vlmrl.config.algo import Algo
from vlmrl.config.base import Section
from vlmrl.config.bench import Head, OneStep, Repeats, Samples, Widths
from vlmrl.config.checks import Unread
from vlmrl.config.ckpt import Ckpt, Logger
from vlmrl.config.data import Columns, Data
from vlmrl.config.ds import Ds
from vlmrl.config.merge import Merge
from vlmrl.config.names import all_but, is_given, settings
from vlmrl.config.reward import Reward, Scoring
from vlmrl.config.rollout import Eval, HeldOut, Rollout
from vlmrl.config.train import Loop, TrainRl
from vlmrl.config.vision import Vision
from vlmrl.config.vllm import Vllm

_CHECKPOINT = ("model_name_or_path", "trust_remote_code")
_EVERY_RUN = ("seed", "timeout_s")
_PUBLISH = ("bucket_mib", "sync_backend")
_TRAINER_BESIDE = ("max_logprob_diff", "enable_sleep")
_ADAPTERS = ("lora", "load_in_4bit", "quant_storage")


class Run(Section):
    """What every verb's settings have."""

    verb: ClassVar[str]
    """How the command line calls it."""
    omits: ClassVar[frozenset[str]] = frozenset()
    """Full names of what its sections hold for other verbs: to this verb they do not exist."""

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        """Full name -> field of every setting that the verb has."""
        return {name: field for name, field in settings(cls).items() if name not in cls.omits}

    @classmethod
    def sections(cls) -> list[str]:
        """Full names of the sections that hold them."""
        found = {name.rsplit(".", depth)[0] for name in cls.settings() for depth in range(1, name.count(".") + 1)}
        return sorted(found)

    def unread(self) -> Unread:
        """Settings that this run does not read, because of what others say: full name -> reason."""
        return {}

    def conflicts(self) -> list[str]:
        """Settings that contradict each other, one line for each contradiction."""
        return []

    @model_validator(mode="after")
    def check_sections_together(self) -> Self:
        unread = dict.fromkeys(self.omits, f"vlmrl {self.verb} does not have it") | self.unread()
        checks.refuse(self, conflicts=self.conflicts(), unread=unread)
        return self


class Training(Run):
    """What the settings of every training verb have."""

    actor: Model
    data: Data
    vision: Vision = Vision()
    train: Loop = Loop()
    ds: Ds = Ds()
    ckpt: Ckpt = Ckpt()
    logger: Logger = Logger()

    def unread(self) -> Unread:
        lora = self.ds.lora
        return (
            checks.unread_of_model(self.actor)
            | checks.unread_of_columns(self.data)
            | checks.unread_of_output(self.ckpt, self.logger)
            | checks.unread_of_ds(self.ds)
            | adapter_checks.unread_of_adapters(self.ds)
            | checks.unread_of_vision(
                self.actor,
                reached_by_adapters=adapter_checks.reaches_vision(self.actor, lora) if lora.rank else None,
                has_reference=self.has_reference,
            )
        )

    @property
    def has_reference(self) -> bool:
        """A frozen model of its own is asked for log-probs too."""
        return False

    def conflicts(self) -> list[str]:
        return [
            *checks.conflicts_of_data(self.data),
            *checks.conflicts_of_ds(self.ds, self.train),
            *adapter_checks.conflicts_of_adapters(self.actor, self.ds),
        ]

    @model_validator(mode="after")
    def resolve_layout(self) -> Self:
        """Let `train.layout` alone say what `ds.packing_samples` may have said."""
        if self.ds.packing_samples is not None and not is_given(self.train, "layout"):
            # Frozen is for those who read the settings; here they are still being made.
            self.__dict__["train"] = self.train.model_copy(update={"layout": checks.layout(self.ds.packing_samples)})
        return self


class RlConfig(Training):
    """Reinforcement learning: sample answers, score them, learn from the better ones."""

    verb: ClassVar[str] = "rl"
    omits: ClassVar[frozenset[str]] = frozenset({"data.output_key"})

    actor: Actor
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
            | checks.unread_of_actor(self.actor)
            | checks.unread_of_algo(self.algo)
            | checks.unread_of_train(self.train)
            | checks.unread_of_user_reward(self.reward)
            | checks.unread_of_reward(self.reward)
            | checks.unread_of_eval(self.eval)
            | adapter_checks.unread_of_engine_base(self.vllm, self.ds)
            | (adapter_checks.unread_of_adapter_reference() if self.reference_is_base else {})
        )

    @property
    def has_reference(self) -> bool:
        return self.algo.kl.init_coef > 0 and not self.reference_is_base

    @property
    def reference_is_base(self) -> bool:
        """The reference is the actor with its adapters off: the same weights, and no model of its own."""
        return self.algo.kl.init_coef > 0 and self.ds.lora.rank > 0 and self.ref.model_name_or_path is None

    def conflicts(self) -> list[str]:
        return [
            *checks.conflicts_of_batch(self.rollout, self.train, self.algo),
            *checks.conflicts_of_sampling(self.rollout, self.reward),
            *checks.conflicts_of_placement(self.vllm, self.train),
            *adapter_checks.conflicts_of_dropout(self.ds.lora, self.rollout, self.train, self.algo),
            *super().conflicts(),
        ]


class SftConfig(Training):
    """Supervised fine-tuning on the labels of a dataset."""

    verb: ClassVar[str] = "sft"
    omits: ClassVar[frozenset[str]] = frozenset({"logger.rollouts"})


class EvalConfig(Run):
    """Evaluation: answers to held-out prompts, scored by the reward functions."""

    verb: ClassVar[str] = "eval"
    omits: ClassVar[frozenset[str]] = (
        all_but(Model, "actor", *_CHECKPOINT)
        | frozenset({"data.output_key"})
        | all_but(Rollout, "rollout", "max_new_tokens")
        | frozenset(f"vllm.{name}" for name in (*_PUBLISH, *_TRAINER_BESIDE, "qlora_base"))
        | all_but(Loop, "train", *_EVERY_RUN)
        | all_but(Ds, "ds", "param_dtype")
        | all_but(Ckpt, "ckpt", "output_dir")
    )

    actor: Model
    eval: HeldOut
    data: Columns = Columns()
    reward: Scoring = Scoring()
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    train: Loop = Loop()
    ds: Ds = Ds()
    ckpt: Ckpt = Ckpt()

    def unread(self) -> Unread:
        return checks.unread_of_columns(self.data) | checks.unread_of_user_reward(self.reward)


class PublishBench(Run):
    """How long weights take from the trainer to the engines. Prints JSON lines."""

    verb: ClassVar[str] = "bench publish"
    omits: ClassVar[frozenset[str]] = (
        all_but(Model, "actor", *_CHECKPOINT, "num_nodes", "num_gpus_per_node")
        | frozenset(f"vllm.{name}" for name in _TRAINER_BESIDE)
        | all_but(Ds, "ds", "param_dtype", "zero_stage", *_ADAPTERS)
    )

    actor: Model
    vllm: Vllm = Vllm()
    ds: Ds = Ds()
    bench: Repeats = Repeats()

    def unread(self) -> Unread:
        return adapter_checks.unread_of_adapters(self.ds) | adapter_checks.unread_of_engine_base(self.vllm, self.ds)

    def conflicts(self) -> list[str]:
        return adapter_checks.conflicts_of_adapters(self.actor, self.ds)


class RolloutBench(Run):
    """How fast the engines answer and how many bytes move, for several numbers of answers. Prints JSON lines."""

    verb: ClassVar[str] = "bench rollout"
    omits: ClassVar[frozenset[str]] = (
        all_but(Model, "actor", *_CHECKPOINT)
        | frozenset({"data.output_key"})
        | all_but(Rollout, "rollout", "batch_size", "max_new_tokens", "temperature")
        | frozenset(f"vllm.{name}" for name in (*_PUBLISH, *_TRAINER_BESIDE, "qlora_base"))
        | all_but(Loop, "train", *_EVERY_RUN)
        | all_but(Ds, "ds", "param_dtype")
    )

    actor: Model
    data: Data
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    train: Loop = Loop()
    ds: Ds = Ds()
    bench: Widths = Widths()

    def unread(self) -> Unread:
        return checks.unread_of_columns(self.data)

    def conflicts(self) -> list[str]:
        return checks.conflicts_of_data(self.data)


class StepBench(Run):
    """What one optimizer step costs in each layout: seconds, memory, equality. Prints JSON lines, and a table."""

    verb: ClassVar[str] = "bench step"
    omits: ClassVar[frozenset[str]] = (
        frozenset(f"actor.{name}" for name in ("num_nodes", "num_gpus_per_node", "gradient_checkpointing_reentrant"))
        | frozenset(f"actor.{name}" for name in ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio"))
        | frozenset({"actor.adapter_name_or_path", "ds.packing_samples", "ds.overlap_comm"})
        | all_but(OneStep, "train", "seed", "micro_batch_size", "max_tokens_per_gpu", "full_determinism_enable")
    )

    actor: Model
    bench: Samples = Samples()
    train: OneStep = OneStep()
    ds: Ds = Ds()

    def unread(self) -> Unread:
        found = adapter_checks.unread_of_adapters(self.ds)
        if not self.bench.image_size:
            found["bench.images_per_prompt"] = "bench.image_size 0 means no images"
        return found

    def conflicts(self) -> list[str]:
        found = []
        if self.ds.zero_stage == 3:
            found.append("ds.zero_stage 3 shards weights over ranks, and bench step runs in one process: use 0, 1 or 2")
        if "shared" in self.bench.layouts and self.ds.attn_implementation in ("sdpa", "eager"):
            found.append(
                f"ds.attn_implementation {self.ds.attn_implementation} does not know of prompts that answers share: "
                "use auto, or leave shared out of bench.layouts"
            )
        if len(set(self.bench.layouts)) < len(self.bench.layouts):
            found.append(f"bench.layouts {' '.join(self.bench.layouts)} names one twice")
        if self.ds.lora.dropout:
            found.append("ds.lora.dropout draws anew in every pass, and bench step compares passes: leave it out")
        loop = self.train.model_copy(update={"layout": "padded"})
        return [
            *found,
            *checks.conflicts_of_ds(self.ds, loop),
            *adapter_checks.conflicts_of_adapters(self.actor, self.ds),
        ]


class MergeConfig(Run):
    """Adapter and base to a model that loads by itself."""

    verb: ClassVar[str] = "merge"
    omits: ClassVar[frozenset[str]] = all_but(Ds, "ds", "param_dtype", "load_in_4bit")

    merge: Merge
    ds: Ds = Ds()


class LogprobsBench(Run):
    """What scoring tokens costs with and without [T, V] logits: seconds, memory, equality. Prints JSON lines."""

    verb: ClassVar[str] = "bench logprobs"

    bench: Head = Head()


VERBS: tuple[type[Run], ...] = (
    *(RlConfig, SftConfig, EvalConfig, MergeConfig),
    *(PublishBench, RolloutBench, StepBench, LogprobsBench),
)
