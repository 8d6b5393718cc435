"""The one adapter of an engine, applied on a CPU: to the rows that asked for it, and without copying it for each.

vLLM's own way on a CPU picks the adapter's matrices once per token of a batch, which copies them as often, and picks
the last adapter for a token that has none: in a batch of both kinds the base answers as if it had the adapter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def apply_to_rows(
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
        b: for each slice [1, 1, out, R], with the scaling in it.
        slices: how many columns of the output belong to each of the layers that were packed.
        rows: [T] True where the adapter counts; None where it counts in all of them.
    """
    start = 0
    for matrix_a, matrix_b, size in zip(a, b, slices, strict=True):
        added = inputs.to(matrix_a.dtype) @ matrix_a[0, 0].T @ matrix_b[0, 0].T
        if rows is not None:
            added = added * rows[:, None]
        output[:, start : start + size] += added
        start += size


def use(wrapper: Any) -> None:
    """Let vLLM's PunicaWrapperCPU, which knows the requests of a batch, apply its one adapter by `apply_to_rows`."""

    def add_lora_linear(
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **unused: Any,
    ) -> None:
        assert scale == 1.0  # it lies in B
        if wrapper.no_lora:
            return
        rows = None if wrapper.batch_size == 1 else wrapper.token_lora_indices >= 0
        output, inputs = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        apply_to_rows(output, inputs, lora_a_stacked, lora_b_stacked, output_slices, rows=rows)

    wrapper.add_lora_linear = add_lora_linear
