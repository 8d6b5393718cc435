"""An adapter counts for the rows that asked for it, in the columns of the layer that it belongs to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vlmrl.rollout.adapter_cpu import apply_to_rows, use

A = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])
"""Room for rank 2, of which 1 is used: it reads the first input."""
B = torch.tensor([[[[3.0, 0.0], [5.0, 0.0]]]])
ZERO_A, ZERO_B = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 1, 2)
INPUTS = torch.tensor([[1.0, 7.0], [2.0, 7.0], [-1.0, 7.0]])


def applied(rows: Tensor | None, dtype: torch.dtype = torch.float32) -> list[list[float]]:
    output = torch.ones(3, 3, dtype=dtype)
    apply_to_rows(
        output, INPUTS.to(dtype), (ZERO_A.to(dtype), A.to(dtype)), (ZERO_B.to(dtype), B.to(dtype)), (1, 2), rows=rows
    )
    return output.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_of_a_packed_one_gets_its_own_matrices(dtype: torch.dtype) -> None:
    assert applied(None, dtype) == [[1, 4, 6], [1, 7, 11], [1, -2, -4]]


def test_rows_of_the_base_stay_as_they_are() -> None:
    assert applied(torch.tensor([True, False, True])) == [[1, 4, 6], [1, 1, 1], [1, -2, -4]]


class Wrapper:
    """What vLLM knows of a batch."""

    def __init__(self, slots: list[int]) -> None:
        self.token_lora_indices = torch.tensor(slots)
        self.batch_size = len(torch.unique_consecutive(self.token_lora_indices))
        self.no_lora = self.batch_size == 1 and slots[0] == -1


@pytest.mark.parametrize(
    ("slots", "wanted"),
    [
        ([-1, -1, -1], [[1, 1], [1, 1], [1, 1]]),
        ([0, 0, 0], [[4, 6], [7, 11], [-2, -4]]),
        ([-1, 0, 0], [[1, 1], [7, 11], [-2, -4]]),
    ],
)
def test_vllm_is_told_to_apply_it_so(slots: list[int], wanted: list[list[float]]) -> None:
    wrapper = Wrapper(slots)
    use(wrapper)
    output = torch.ones(3, 2)
    wrapper.add_lora_linear(output, INPUTS, (A,), (B,), 1.0, (2,))  # type: ignore[attr-defined]
    assert output.tolist() == wanted
