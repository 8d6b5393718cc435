"""Files and weight syncs hold experts as the checkpoints of their family do, whatever Transformers would write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from vlmrl.models.load import load_model

EXPERTS = "model.language_model.layers.0.mlp.experts"


def test_a_family_with_fused_experts_is_written_as_it_was_read(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Micro models have 4 experts, width 64 and 48 channels inside. Published checkpoints hold [experts, in, out]."""
    path = folder("qwen3_vl_moe")
    files = load_file(path / "model.safetensors")
    assert files[f"{EXPERTS}.gate_up_proj"].shape == (4, 64, 96)
    assert files[f"{EXPERTS}.down_proj"].shape == (4, 48, 64)
    net = load_model(str(path), dtype=torch.float32, attn_implementation="sdpa")
    held = dict(net.named_parameters())
    assert torch.equal(held[f"{EXPERTS}.down_proj"], files[f"{EXPERTS}.down_proj"].transpose(1, 2))
    net.save_pretrained(tmp_path)
    for written in (load_file(tmp_path / "model.safetensors"), revert_weight_conversion(net, dict(held))):
        assert all(torch.equal(files[name], tensor) for name, tensor in written.items())
        assert files.keys() == written.keys()


def test_files_that_transformers_wrote_are_read_and_written_in_the_familys_layout(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    path = folder("qwen3_vl_moe")
    files = load_file(path / "model.safetensors")
    turned = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in files.items()}
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    net = load_model(str(tmp_path), dtype=torch.float32, attn_implementation="sdpa")
    written = revert_weight_conversion(net, dict(net.named_parameters()))
    assert all(torch.equal(files[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl", "qwen2_5_vl", "llama"])
def test_other_families_are_written_as_they_were_read(folder: Callable[..., Path], tmp_path: Path, family: str) -> None:
    files = load_file(folder(family) / "model.safetensors")
    net = load_model(str(folder(family)), dtype=torch.float32, attn_implementation="sdpa")
    net.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert files.keys() == written.keys()
    assert all(torch.equal(files[name], tensor) for name, tensor in written.items())
