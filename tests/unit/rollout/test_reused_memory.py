"""Memory of a loaded bucket is reused for the next one: nothing may read it later."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from layers_of_vllm import Worker, weights
from torch import Tensor

from vlmrl.models.weight_buckets import digest
from vlmrl.rollout.reports import find_problem
from vlmrl.rollout.worker_extension import WeightUpdate


class ReusesMemory(WeightUpdate):
    """Loads each tensor alone, from memory that is overwritten afterwards."""

    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str] = digest) -> None:
        for name, tensor in tensors:
            shared = tensor.clone()
            super().load([(name, shared)], digest_of)
            shared.fill_(7.0)


class WithoutCopies(ReusesMemory):
    """The planted fault: vLLM keeps views of the reused memory."""

    def _copy_deferred(self, named: Iterable[tuple[str, Tensor]]) -> None:
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_layers_hold_what_was_sent_after_its_memory_is_overwritten(dtype: torch.dtype, tied: bool) -> None:
    replica = Worker(tied=tied, dtype=dtype)
    for seed in range(3):
        assert find_problem([replica.sync(weights(tied=tied, dtype=dtype), seed=seed, kind=ReusesMemory)]) is None


def test_without_copies_of_deferred_tensors_fused_and_padded_layers_are_wrong() -> None:
    replica = Worker(tied=False, dtype=torch.float32)
    problem = find_problem([replica.sync(weights(tied=False, dtype=torch.float32), seed=0, kind=WithoutCopies)])
    assert problem is not None
    # vLLM waits for the padding of vocabularies until the end.
    assert "embed_tokens" in problem
