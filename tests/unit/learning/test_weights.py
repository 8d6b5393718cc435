"""Checkpoint tensors of a model: names of the checkpoint, dequantized, without adapters or with adapters merged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from vlmrl.config.ds import Ds
from vlmrl.learning.weights import checkpoint_tensors, saved_tensors, split_by_bytes, written_bytes
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.adapters import adapters_off, inject_adapter
from vlmrl.models.load import freeze, load_model
from vlmrl.models.quantize import dequantized, four_bit, is_four_bit
from vlmrl.plugins import processor

Make = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder(family, tied=...)`: a micro model, built once."""

    def make(family: tiny.Family, *, tied: bool = False) -> Path:
        out = tmp_path_factory.getbasetemp() / f"weights_{family}_{tied}"
        return out if out.exists() else tiny.build(family, out, tied=tied, size="micro")

    return make


@pytest.fixture
def adapted(folder: Callable[..., Path]) -> Make:
    """`adapted(family, bits=..., **plan)`: a micro model with nonzero adapters on q and down."""

    def make(family: tiny.Family, *, bits: bool = False, tied: bool = False, **plan: Any) -> PreTrainedModel:
        path = str(folder(family, tied=tied))
        read = processor(path, min_pixels=3136, max_pixels=100_000)
        options = four_bit(Ds(load_in_4bit=bits), read)
        net = load_model(path, dtype=torch.float32, attn_implementation="sdpa", four_bit=options)
        freeze(net, read, vision=False, projector=False)
        ends = ("language_model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "0.mlp.down_proj")
        targets = tuple(name for name, _ in net.named_modules() if "visual" not in name and name.endswith(ends))
        settings = {"rank": 2, "alpha": 3.0, "dropout": 0.0, "is_rank_stabilized": False, "has_magnitude": False}
        inject_adapter(net, AdapterPlan(**(settings | plan), targets=targets, groups=frozenset({"language"})))
        torch.manual_seed(0)
        for name, parameter in net.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.2)
        return net.eval()

    return make


def _logits(net: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = net(input_ids=torch.arange(5, 40)[None]).logits
    return logits


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_text", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [False, True])
def test_names_and_shapes_are_those_of_the_checkpoint_even_with_adapters_and_4_bits(
    adapted: Make, folder: Callable[..., Path], family: str, tied: bool, bits: bool
) -> None:
    net = adapted(family, bits=bits, tied=tied)
    stored = load_file(folder(family, tied=tied) / "model.safetensors")
    for merge in (False, True):
        tensors = checkpoint_tensors(net, saved_tensors(net), merge=merge)
        assert {name: tensor.shape for name, tensor in tensors} == {
            name: tensor.shape for name, tensor in stored.items()
        }
        assert len(tensors) == len(stored)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_without_merging_tensors_equal_the_base_files(adapted: Make, folder: Callable[..., Path], family: str) -> None:
    net = adapted(family)
    stored = load_file(folder(family) / "model.safetensors")
    for name, tensor in checkpoint_tensors(net, saved_tensors(net), merge=False):
        assert torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("bits", [False, True])
def test_merged_weights_are_the_base_plus_alpha_over_rank_times_b_a(adapted: Make, bits: bool) -> None:
    net = adapted("qwen3", bits=bits)
    layer: Any = net.model.layers[1].self_attn.q_proj
    merged = dict(checkpoint_tensors(net, saved_tensors(net), merge=True))
    b, a = layer.lora_B["default"].weight, layer.lora_A["default"].weight
    wanted = dequantized(layer.base_layer.weight) + 3 / 2 * b @ a
    torch.testing.assert_close(merged["model.layers.1.self_attn.q_proj.weight"], wanted, rtol=0, atol=1e-6)
    untouched = dequantized(net.model.layers[0].self_attn.q_proj.weight)
    assert torch.equal(merged["model.layers.0.self_attn.q_proj.weight"], untouched)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize("bits", [False, True])
def test_a_model_of_the_written_tensors_has_the_logits_of_the_adapted_one(
    adapted: Make, folder: Callable[..., Path], tmp_path: Path, family: str, magnitude: bool, bits: bool
) -> None:
    net = adapted(family, bits=bits, has_magnitude=magnitude)
    base = load_model(str(folder(family)), dtype=torch.float32, attn_implementation="sdpa").eval()
    for merge in (False, True):
        tensors = [(name, t.clone()) for name, t in saved_tensors(base)]
        new = dict(checkpoint_tensors(net, saved_tensors(net), merge=merge))
        assert len(new) == len(tensors)
        base.save_pretrained(tmp_path / str(merge), state_dict=new, save_original_format=False)
        again = load_model(str(tmp_path / str(merge)), dtype=torch.float32, attn_implementation="sdpa").eval()
        if merge:
            wanted = _logits(net)
        else:
            with adapters_off(net):
                wanted = _logits(net)
        torch.testing.assert_close(_logits(again), wanted, rtol=0, atol=1e-4)
    assert float((_logits(net) - wanted).abs().max()) < 1e-6


def test_runs_are_split_by_dequantized_size(adapted: Make) -> None:
    net = adapted("qwen3", bits=True)
    tensors = dict(saved_tensors(net))
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    assert is_four_bit(up)
    assert written_bytes(up) == 96 * 64 * 4
    runs = split_by_bytes(list(tensors.items()), max_bytes=60_000)
    assert [pair for run in runs for pair in run] == list(tensors.items())
    for run in runs:
        size = sum(t.numel() * t.element_size() for _, t in checkpoint_tensors(net, run, merge=True))
        assert size <= 60_000 or len(run) == 1
