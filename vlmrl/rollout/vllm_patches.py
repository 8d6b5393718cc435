"""Changes to vLLM 0.32 at run time, each for a fault or a cost that vLLM has no setting for."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrl.system.lifeline import Lifeline

if TYPE_CHECKING:
    from torch import Tensor, nn

# ---- images of preempted requests


class KeepImages(Lifeline):
    """A lifeline that also calls `keep_images` on arrival: in the engine core, before anything is scheduled there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, super().__reduce__()


def _unpickle(arrive: Callable[..., Lifeline], arguments: tuple[Any, ...]) -> Lifeline:
    arrive(*arguments)
    keep_images()
    return KeepImages()


def keep_images() -> None:
    """Let the scheduler of this process send every request to the workers with all its images. Idempotent.

    vLLM drops the pixels of an image that is in the prefix cache when its request starts. But a preempted request (its
    KV cache was needed, or new weights made it worthless) starts again without that cache, and its features are not
    sent a second time: "Expected number of multimodal embeddings to match number of input items", and the engine dies.
    """
    from vllm.v1.core.sched import output

    assert hasattr(output, "strip_covered_mm_data"), "this vLLM drops the pixels of cached images in another way"
    output.strip_covered_mm_data = _all_features


def _all_features(mm_features: list[Any], num_computed_tokens: int, uses_mrope: bool = False) -> list[Any]:
    return mm_features


# ---- seeds on CPU


def hold_unused_generators(runner: Any) -> None:
    """Keep the random generators of requests whose sample will be discarded out of that step.

    A prompt that is prefilled in pieces yields a sample with every piece, and only the last one counts. After each of
    the others vLLM's model runner rewinds the generator of the request, in a way that only CUDA generators support: on
    CPU a request with a seed kills the engine ("CPU Generator does not use offset"). Without its generator the row
    draws from the global one, and nothing needs rewinding.
    """
    sample_tokens = runner.sample_tokens

    def sample(grammar_output: Any) -> Any:
        batch = runner.input_batch
        unused = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        held = {row: batch.generators.pop(row) for row in unused if row in batch.generators}
        try:
            return sample_tokens(grammar_output)
        finally:
            batch.generators.update(held)

    runner.sample_tokens = sample


# ---- experts on CPU


def pack_experts_again(model: nn.Module) -> None:
    """Let the experts' weights be packed after every weight update, as after the first load. For CPUs.

    vLLM packs them for its CPU kernel only when it builds that kernel, with the first load. A later load leaves the
    plain weights in memory that the kernel reads as packed: the same weights move log-probs by 0.5. On GPUs the layout
    is made in `convert_to_unquantized_kernel_format`, which each load calls.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and not hasattr(method, "vlmrl_process"):
            method.vlmrl_process = method.process_weights_after_loading
            method.process_weights_after_loading = MethodType(_process_and_pack, method)


def _process_and_pack(method: Any, layer: nn.Module) -> None:
    method.vlmrl_process(layer)
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


# ---- stages on CPU


def make_stage_inputs(runner: Any) -> None:
    """Make the buffers in which a stage of a pipeline receives the hidden states of the one before. For CPUs.

    vLLM makes them in a trial run with dummy tokens, which its CPU workers leave out when the size of the KV cache is
    given: the first request to a second stage then ends the engine.
    """
    from vllm.distributed import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


# ---- adapters on CPU


def apply_adapter_by_row(wrapper: Any) -> None:
    """Let vLLM's PunicaWrapperCPU apply its one adapter by `add_adapter_output`.

    vLLM's own code for CPUs gathers the adapter's matrices once per token of a batch, which copies them as often, and
    gathers the last adapter for a token without one: in a mixed batch the base responds as if it had the adapter.
    """

    def add_lora_linear(
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **unused: Any,
    ) -> None:
        assert scale == 1.0  # vLLM has multiplied B by it
        if wrapper.no_lora:
            return
        rows = None if wrapper.batch_size == 1 else wrapper.token_lora_indices >= 0
        output, inputs = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        add_adapter_output(output, inputs, lora_a_stacked, lora_b_stacked, output_slices, rows=rows)

    wrapper.add_lora_linear = add_lora_linear


def add_adapter_output(
    output: Tensor,
    inputs: Tensor,
    a: tuple[Tensor, ...],
    b: tuple[Tensor, ...],
    slices: tuple[int, ...],
    *,
    rows: Tensor | None,
) -> None:
    """Add B @ A @ x to the rows of a packed layer's output, in place.

    Args:
        output: [T, sum of `slices`].
        inputs: [T, in].
        a: for each slice [1, 1, R, in].
        b: for each slice [1, 1, out, R], multiplied by the scaling.
        slices: the number of output columns of each of the packed layers.
        rows: [T] True where the adapter applies; None where it applies to all.
    """
    start = 0
    for matrix_a, matrix_b, size in zip(a, b, slices, strict=True):
        added = inputs.to(matrix_a.dtype) @ matrix_a[0, 0].T @ matrix_b[0, 0].T
        if rows is not None:
            added = added * rows[:, None]
        output[:, start : start + size] += added
        start += size
