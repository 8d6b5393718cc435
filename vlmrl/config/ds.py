"""DeepSpeed ZeRO, precision, adapters and kernels."""

from typing import Literal, Self

from pydantic import model_validator

from vlmrl.config.base import ConflictError, PositiveInt, Section, Unread
from vlmrl.config.lora import Lora
from vlmrl.config.names import is_given
from vlmrl.config.optimizer import OptimizerSettings
from vlmrl.config.train import Layout, Loop
from vlmrl.startup.driver import shows_gpu


class Ds(Section):
    """DeepSpeed ZeRO, precision, adapters and kernels."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """Sharded over ranks: 1 optimizer state, 2 also gradients, 3 also weights."""
    param_dtype: Literal["auto", "bf16", "fp32"] = "bf16"
    """Precision of weights and activations; auto is bf16 if an NVIDIA GPU is visible, else fp32."""
    lora: Lora = Lora()
    """Low-rank adapters."""
    load_in_4bit: bool = False
    """Hold the base in 4 bits (NF4 with double quantisation, arXiv:2305.14314) and train adapters: needs
    `ds.lora.rank`. Vision tower, projector and output layer are not quantised."""
    quant_storage: Literal["auto", "uint8", "bf16", "fp32"] = "auto"
    """Storage type of 4-bit weights. auto chooses: uint8, or `ds.param_dtype` with ZeRO-3, which shards only that."""
    adam_offload: bool = False
    """Keep the optimizer state in CPU memory."""
    offload: Literal["none", "cpu"] = "none"
    """Keep the weights of actor and critic in CPU memory (cpu) while no layer computes with them, for models whose
    shards do not fit beside a pass: every pass copies them to the GPU. Needs `ds.zero_stage` 3 and
    `ds.adam_offload`."""
    enable_sleep: bool = False
    """Keep the optimizer state in CPU memory except during updates, while engines on the same GPUs
    (`train.colocate_all`) generate: 12 bytes per trained parameter over all ranks. Needs CUDA and `ds.zero_stage` 2."""
    attn_implementation: Literal["auto", "sdpa", "eager", "varlen"] = "auto"
    """Attention kernel: `varlen` is PyTorch's own on CUDA; auto chooses by device."""
    experts_implementation: Literal["auto", "eager", "batched_mm", "grouped_mm"] = "auto"
    """Kernel of mixtures of experts: `eager` applies one expert after the other, `batched_mm` copies the weights for
    each token, `grouped_mm` is one product for all; auto is `grouped_mm` where it runs."""
    expert_parallel_size: PositiveInt = 1
    """Ranks over which the experts of each layer are spread (arXiv:2006.16668): each holds a share of them, and tokens
    travel to theirs and back. The number of ranks is a multiple of it."""
    use_liger_kernel: bool = False
    """Fused norms and feed-forward layers by Liger, on CUDA. The logits of all tokens are never held at once anyway."""
    packing_samples: bool | None = None
    """OpenRLHF's name for `train.layout`: true is shared, false is padded."""
    sequence_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of each forward-backward pass of actor and critic (Ulysses, arXiv:2309.14509), for
    sequences whose activations are too large for one GPU. It divides the number of attention heads, and of ranks."""
    ring_attn_size: PositiveInt | None = None
    """OpenRLHF's name for `ds.sequence_parallel_size`."""
    overlap_comm: bool = False
    """Overlap gradient communication with the backward pass."""

    @model_validator(mode="after")
    def resolve_dtype(self) -> Self:
        """Resolve auto."""
        if self.param_dtype == "auto":
            # The section is frozen, and this validator is still constructing it.
            self.__dict__["param_dtype"] = "bf16" if shows_gpu() else "fp32"
        return self

    @model_validator(mode="after")
    def resolve_sequence(self) -> Self:
        """Apply OpenRLHF's `ds.ring_attn_size` to `ds.sequence_parallel_size`."""
        ring, size = self.ring_attn_size, self.sequence_parallel_size
        if ring is not None and not is_given(self, "sequence_parallel_size"):
            self.__dict__["sequence_parallel_size"] = ring
        elif ring not in (None, size):
            raise ConflictError(
                [f"ds.ring_attn_size {ring} means ds.sequence_parallel_size {ring}, but it is {size}: give one of them"]
            )
        return self


def unread_of_ds(ds: Ds) -> Unread:
    return {} if ds.zero_stage else {"ds.overlap_comm": "ds.zero_stage 0 communicates once, after the backward pass"}


def conflicts_of_ds(ds: Ds, train: Loop) -> list[str]:
    conflicts = []
    if ds.adam_offload and ds.zero_stage == 0:
        conflicts.append("ds.adam_offload needs a sharded optimizer: set ds.zero_stage to 1, 2 or 3")
    conflicts += conflicts_of_offload(ds, flag="ds.zero_stage", stage=ds.zero_stage)
    packs = train.layout != "padded"
    if is_given(train, "layout") and ds.packing_samples not in (None, packs):
        flag, meant = str(ds.packing_samples).lower(), layout(not packs)
        conflicts.append(
            f"ds.packing_samples {flag} means train.layout {meant}, but it is {train.layout}: give one of them"
        )
    if train.layout == "shared" and ds.packing_samples is not False and ds.attn_implementation in ("sdpa", "eager"):
        conflicts.append(
            f"ds.attn_implementation {ds.attn_implementation} does not support prompts that responses share: set "
            "train.layout packed or padded, or ds.attn_implementation auto"
        )
    return conflicts


def conflicts_of_offload(ds: Ds, *, flag: str, stage: int | None) -> list[str]:
    """`stage` is a ZeRO stage, and `flag` the setting that it comes from."""
    if ds.offload == "none":
        return []
    conflicts = []
    if stage != 3:
        conflicts.append(f"ds.offload {ds.offload} moves shards of weights, which only {flag} 3 makes, not {stage}")
    if not ds.adam_offload:
        conflicts.append(
            f"ds.offload {ds.offload} keeps 2 bytes per parameter off the GPU, and the optimizer 12 on it: set "
            "ds.adam_offload too"
        )
    if ds.load_in_4bit:
        conflicts.append(
            f"ds.offload {ds.offload} with ds.load_in_4bit is not built: weights of 4 bits are loaded on the GPU in "
            "full: leave one of them out"
        )
    if ds.expert_parallel_size > 1:
        conflicts.append(
            f"ds.offload {ds.offload} with ds.expert_parallel_size {ds.expert_parallel_size} has not been tried: leave "
            "one of them out"
        )
    return conflicts


def conflicts_of_sequence(ds: Ds, num_ranks: dict[str, int]) -> list[str]:
    """`num_ranks`: for each trained model, the settings of its ranks -> their number."""
    size = ds.sequence_parallel_size
    if size == 1:
        return []
    conflicts = [
        f"ds.sequence_parallel_size {size} does not divide the {number} rank{'s' if number > 1 else ''} of {flags}: "
        f"use a multiple of {size} ranks"
        for flags, number in num_ranks.items()
        if number % size
    ]
    if ds.attn_implementation in ("sdpa", "eager"):
        conflicts.append(
            f"ds.attn_implementation {ds.attn_implementation} would let the samples of a pack attend to each other "
            f"with ds.sequence_parallel_size {size}: use auto"
        )
    return conflicts


def conflicts_of_optimizer(role: str, optimizer: OptimizerSettings, ds: Ds) -> list[str]:
    """`role` is `actor` or `critic`."""
    conflicts = []
    if ds.adam_offload and optimizer.optim != "adam":
        conflicts.append(
            f"ds.adam_offload moves the state of PyTorch's AdamW to CPU memory, and {role}.optim {optimizer.optim} has "
            "its own: leave one of them out"
        )
    return conflicts


def layout(packing_samples: bool) -> Layout:
    """The `train.layout` that OpenRLHF's `ds.packing_samples` means."""
    return "shared" if packing_samples else "padded"
