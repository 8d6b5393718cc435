"""Routers are found in every layer, and experts compute in fp64 where grouped products cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from vlmrl.models.experts import plain_experts, routers

Make = Callable[..., PreTrainedModel]


@pytest.mark.parametrize(("family", "number"), [("qwen3_moe", 2), ("qwen3_vl_moe", 2), ("qwen3_vl", 0), ("llama", 0)])
def test_every_layer_with_experts_has_a_router(net: Make, family: str, number: int) -> None:
    assert len(routers(net(family))) == number


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_experts_compute_in_fp64_only_within_the_context(net: Make, family: str) -> None:
    model, ids = net(family), torch.arange(20)[None]
    expected = model(ids).logits
    wide = net(family).double()
    with plain_experts(wide):
        torch.testing.assert_close(wide(ids).logits.float(), expected, atol=1e-4, rtol=0)
    with pytest.raises(RuntimeError, match="Float32"):
        wide(ids)
