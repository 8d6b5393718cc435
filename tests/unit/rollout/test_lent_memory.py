"""What is loaded lies in memory that the next bucket is written to: nothing of it may be read later."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from layers_of_vllm import Worker, weights
from torch import Tensor

from vlmrl.models.weights import digest
from vlmrl.rollout.reports import problem_of
from vlmrl.rollout.worker_extension import WeightUpdate


class Lent(WeightUpdate):
    """Every tensor comes alone, in memory that is written over when it has been loaded."""

    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str] = digest) -> None:
        for name, tensor in tensors:
            lent = tensor.clone()
            super().load([(name, lent)], digest_of)
            lent.fill_(7.0)


class Careless(Lent):
    """The planted fault: vLLM is left with what it was lent."""

    def _keep_what_waits(self, named: Iterable[tuple[str, Tensor]]) -> None:
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_layers_hold_what_was_sent_whatever_is_written_to_its_memory_later(dtype: torch.dtype, tied: bool) -> None:
    made = Worker(tied=tied, dtype=dtype)
    for seed in range(3):
        assert problem_of([made.sync(weights(tied=tied, dtype=dtype), seed=seed, kind=Lent)]) is None


def test_without_copies_of_what_waits_fused_and_padded_layers_hold_something_else() -> None:
    made = Worker(tied=False, dtype=torch.float32)
    problem = problem_of([made.sync(weights(tied=False, dtype=torch.float32), seed=0, kind=Careless)])
    assert problem is not None
    # Vocabularies have padding, for which vLLM waits till the end.
    assert "embed_tokens" in problem
