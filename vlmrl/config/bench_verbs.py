"""The settings of the measurements, `vlmrl bench`."""

from typing import ClassVar

from vlmrl.config import adapters, data, ds, optimizer
from vlmrl.config.actor import Model
from vlmrl.config.agent import Agent
from vlmrl.config.base import Unread
from vlmrl.config.bench import (
    Asynchrony,
    AsyncRollout,
    ChatRows,
    Conversations,
    OneStep,
    OutputLayer,
    PairBatch,
    Repeats,
    ResponseCounts,
    SyntheticBatch,
)
from vlmrl.config.data import Data
from vlmrl.config.ds import Ds
from vlmrl.config.names import all_but
from vlmrl.config.rollout import Rollout
from vlmrl.config.train import Loop
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verbs import CHECKPOINT, COMMON, SYNC, WITH_TRAINER
from vlmrl.config.vllm import Vllm

_ADAPTERS = ("lora", "load_in_4bit", "quant_storage")


class SyncBench(VerbConfig):
    """Measure the time of a weight sync from trainer to engines. Prints JSON lines."""

    verb: ClassVar[str] = "bench sync"
    omits: ClassVar[frozenset[str]] = (
        all_but(Model, "actor", *CHECKPOINT, "num_nodes", "num_gpus_per_node")
        | frozenset(f"vllm.{name}" for name in (*WITH_TRAINER, "generate_timeout_s"))
        | frozenset({"ds.lora.dropout"})
        | all_but(Ds, "ds", "param_dtype", "zero_stage", *_ADAPTERS)
    )

    actor: Model
    vllm: Vllm = Vllm()
    ds: Ds = Ds()
    bench: Repeats = Repeats()

    def unread(self) -> Unread:
        return adapters.unread_of_adapters(self.ds) | adapters.unread_of_engine_base(self.vllm, self.ds)

    def conflicts(self) -> list[str]:
        return adapters.conflicts_of_adapters(self.actor, self.ds)


class RolloutBench(VerbConfig):
    """Measure rollout speed and transferred bytes for several numbers of responses. Prints JSON lines."""

    verb: ClassVar[str] = "bench rollout"
    omits: ClassVar[frozenset[str]] = (
        all_but(Model, "actor", *CHECKPOINT)
        | frozenset({"data.output_key", "data.eval_fraction"})
        | all_but(Rollout, "rollout", "batch_size", "max_new_tokens", "temperature")
        | frozenset(f"vllm.{name}" for name in (*SYNC, *WITH_TRAINER, "qlora_base"))
        | all_but(Loop, "train", *COMMON)
        | all_but(Ds, "ds", "param_dtype")
    )

    actor: Model
    data: Data
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    train: Loop = Loop()
    ds: Ds = Ds()
    bench: ResponseCounts = ResponseCounts()

    def unread(self) -> Unread:
        return data.unread_of_columns(self.data)

    def conflicts(self) -> list[str]:
        return data.conflicts_of_data(self.data)


class AgentsBench(VerbConfig):
    """Measure conversations with environments that wait, against the same tokens without them. Prints JSON lines."""

    verb: ClassVar[str] = "bench agents"
    omits: ClassVar[frozenset[str]] = (
        all_but(Model, "actor", *CHECKPOINT)
        | all_but(Agent, "agent", "num_workers")
        | frozenset(f"vllm.{name}" for name in (*SYNC, *WITH_TRAINER, "num_engines", "qlora_base"))
        | all_but(Loop, "train", *COMMON)
        | all_but(Ds, "ds", "param_dtype")
    )

    actor: Model
    agent: Agent = Agent()
    vllm: Vllm = Vllm()
    train: Loop = Loop()
    ds: Ds = Ds()
    bench: Conversations = Conversations()


class AsyncBench(VerbConfig):
    """Measure the steps of synchronous and asynchronous runs, in turn, on the same roles. Prints JSON lines, and a
    table."""

    verb: ClassVar[str] = "bench async"
    omits: ClassVar[frozenset[str]] = (
        all_but(Model, "actor", *CHECKPOINT)
        | all_but(Agent, "agent", "num_workers")
        | all_but(Rollout, "rollout", "batch_size", "n_samples_per_prompt")
        | frozenset({"vllm.num_engines", "vllm.qlora_base", "vllm.enable_sleep", "vllm.quantization"})
        | all_but(Loop, "train", *COMMON)
        | all_but(Ds, "ds", "param_dtype")
    )

    actor: Model
    agent: Agent = Agent()
    rollout: AsyncRollout = AsyncRollout()
    vllm: Vllm = Vllm()
    train: Loop = Loop()
    ds: Ds = Ds()
    bench: Asynchrony = Asynchrony()

    def unread(self) -> Unread:
        if self.bench.workload == "environment":
            return {}
        names = ("agent.num_workers", "bench.step_s", "bench.turns")
        return dict.fromkeys(names, f"bench.workload {self.bench.workload} has no environment")

    def conflicts(self) -> list[str]:
        return [
            f"bench.steps {self.bench.steps} is no multiple of {1 + queue}: with bench.queue_sizes {queue} the time of "
            f"a step repeats every {1 + queue} steps"
            for queue in self.bench.queue_sizes
            if self.bench.steps % (1 + queue)
        ]


class StepBench(VerbConfig):
    """Measure an optimizer step in each layout: time, memory, equality. Prints JSON lines, and a table."""

    verb: ClassVar[str] = "bench step"
    omits: ClassVar[frozenset[str]] = (
        frozenset(f"actor.{name}" for name in ("num_nodes", "num_gpus_per_node", "gradient_checkpointing_reentrant"))
        | frozenset(f"actor.{name}" for name in ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio"))
        | frozenset({"actor.adapter_name_or_path", "ds.packing_samples", "ds.overlap_comm", "ds.enable_sleep"})
        | frozenset({"ds.expert_parallel_size"})
        | all_but(OneStep, "train", "seed", "micro_batch_size", "max_tokens_per_gpu", "full_determinism_enable")
    )

    actor: Model
    bench: SyntheticBatch = SyntheticBatch()
    train: OneStep = OneStep()
    ds: Ds = Ds()

    def unread(self) -> Unread:
        unread = optimizer.unread_of_optimizer("actor", self.actor) | adapters.unread_of_adapters(self.ds)
        if not self.bench.image_size:
            unread["bench.images_per_prompt"] = "bench.image_size 0 means no images"
        return unread

    def conflicts(self) -> list[str]:
        conflicts = []
        if self.ds.zero_stage == 3:
            conflicts.append(
                "ds.zero_stage 3 shards weights over ranks, and these measurements are of whole ones: use 0, 1 or 2"
            )
        if "shared" in self.bench.layouts and self.ds.attn_implementation in ("sdpa", "eager"):
            conflicts.append(
                f"ds.attn_implementation {self.ds.attn_implementation} does not support prompts that responses share: "
                "use auto, or leave shared out of bench.layouts"
            )
        if len(set(self.bench.layouts)) < len(self.bench.layouts):
            conflicts.append(f"bench.layouts {' '.join(self.bench.layouts)} names a layout twice")
        if self.ds.lora.dropout:
            conflicts.append("ds.lora.dropout differs in every pass, and passes are compared: leave it out")
        loop = self.train.model_copy(update={"layout": "padded"})
        return [
            *conflicts,
            *ds.conflicts_of_ds(self.ds, loop),
            *ds.conflicts_of_sequence(self.ds, {}),
            *adapters.conflicts_of_adapters(self.actor, self.ds),
        ]


class SftBench(VerbConfig):
    """Measure an optimizer step of supervised training, packed and padded, on rows of chat-like lengths. Prints JSON
    lines, and a table."""

    verb: ClassVar[str] = "bench sft"
    omits: ClassVar[frozenset[str]] = (
        frozenset(f"actor.{name}" for name in ("num_nodes", "num_gpus_per_node", "gradient_checkpointing_reentrant"))
        | frozenset(f"actor.{name}" for name in ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio"))
        | frozenset({"actor.adapter_name_or_path", "ds.packing_samples", "ds.overlap_comm", "ds.enable_sleep"})
        | frozenset({"ds.sequence_parallel_size", "ds.ring_attn_size", "ds.expert_parallel_size"})
        | all_but(Loop, "train", "seed", "max_tokens_per_gpu", "full_determinism_enable")
    )

    actor: Model
    bench: ChatRows = ChatRows()
    train: Loop = Loop()
    ds: Ds = Ds()

    def unread(self) -> Unread:
        return optimizer.unread_of_optimizer("actor", self.actor) | adapters.unread_of_adapters(self.ds)

    def conflicts(self) -> list[str]:
        conflicts = []
        if self.ds.zero_stage == 3:
            conflicts.append("ds.zero_stage 3 shards weights over ranks, and bench sft is one process: use 0, 1 or 2")
        if self.bench.mean_tokens >= self.bench.max_tokens:
            conflicts.append(
                f"bench.mean_tokens {self.bench.mean_tokens} must be below bench.max_tokens {self.bench.max_tokens}"
            )
        loop = self.train.model_copy(update={"layout": "packed"})
        return [*conflicts, *ds.conflicts_of_ds(self.ds, loop), *adapters.conflicts_of_adapters(self.actor, self.ds)]


class DpoBench(StepBench):
    """Measure an optimizer step of DPO in each layout: `padded` and `packed` compute the prompt of a pair twice. Prints
    JSON lines, and a table."""

    verb: ClassVar[str] = "bench dpo"
    omits: ClassVar[frozenset[str]] = StepBench.omits | {
        "bench.n_samples_per_prompt",
        "ds.sequence_parallel_size",
        "ds.ring_attn_size",
    }

    bench: PairBatch = PairBatch()


class LogprobsBench(VerbConfig):
    """Measure log-probs with and without [T, V] logits: time, memory, equality. Prints JSON lines."""

    verb: ClassVar[str] = "bench logprobs"

    bench: OutputLayer = OutputLayer()
