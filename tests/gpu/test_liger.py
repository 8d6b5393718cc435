"""Liger's layers compute the same function as the model's, forward and backward."""

from pathlib import Path

import pytest
import torch

from vlmrl.commands.self_test.layers import compare_liger
from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.models.liger import apply_liger
from vlmrl.models.load import load_model

CUDA = torch.device("cuda")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_fused_layers_change_neither_logits_nor_gradients(tmp_path: Path, family: tiny.Family) -> None:
    difference = compare_liger(tmp_path, family)
    assert difference.logits <= 1e-3
    assert difference.gradients <= 1e-2


def test_a_family_without_liger_kernels_is_refused(tmp_path: Path) -> None:
    net = load_model(str(tiny.build("qwen3", tmp_path / "model")), dtype=torch.float32, attn_implementation="sdpa")
    net.config.model_type = "unheard_of"
    with pytest.raises(ConfigError, match="no kernels for unheard_of models"):
        apply_liger(net, CUDA)
