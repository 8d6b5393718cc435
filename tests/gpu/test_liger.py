"""Liger's layers are the model's own, forward and backward."""

import copy
from pathlib import Path

import pytest
import torch

from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.models.liger import apply_liger
from vlmrl.models.load import load_model

CUDA = torch.device("cuda")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_fused_layers_change_neither_logits_nor_gradients(tmp_path: Path, family: tiny.Family) -> None:
    folder = tiny.build(family, tmp_path / family)
    plain = load_model(str(folder), dtype=torch.float32, attn_implementation="sdpa").to(CUDA)
    fused = copy.deepcopy(plain)
    apply_liger(fused, CUDA)
    assert any("Liger" in type(module).__name__ or "Liger" in repr(module.forward) for module in fused.modules())
    tokens = torch.arange(40, device=CUDA)[None] + 65
    found, expected = fused(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    found.square().mean().backward()
    expected.square().mean().backward()
    for mine, other in zip(fused.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, atol=1e-3, rtol=1e-2)


def test_a_family_that_liger_does_not_know_is_refused(tmp_path: Path) -> None:
    net = load_model(str(tiny.build("qwen3", tmp_path / "model")), dtype=torch.float32, attn_implementation="sdpa")
    net.config.model_type = "unheard_of"
    with pytest.raises(ConfigError, match="no kernels for unheard_of models"):
        apply_liger(net, CUDA)
