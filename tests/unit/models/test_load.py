"""Models are loaded completely or refused; frozen parts, patch embeddings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vlmrl.config.ds import Ds
from vlmrl.errors import ConfigError
from vlmrl.models.load import PatchProjection, freeze, load_model, project_patches, skeleton, trainable_table
from vlmrl.models.quantize import four_bit

Make = Callable[..., Any]


def read(path: Path | str, *, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(str(path), dtype=dtype, attn_implementation="sdpa")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3"])
def test_a_model_is_loaded_with_its_weights(folder: Make, family: str) -> None:
    stored = load_file(folder(family) / "model.safetensors")
    net = read(folder(family))
    assert "lm_head.weight" in stored
    torch.testing.assert_close(net.lm_head.weight.data, stored["lm_head.weight"], rtol=0, atol=0)
    assert read(folder(family), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_missing_folder_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"there is no folder \./nowhere/model") as caught:
        read("./nowhere/model")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model that can be read") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_every_loader_refuses_pickled_weights(folder: Make, tmp_path: Path) -> None:
    from vlmrl.plugins import processor

    copy = shutil.copytree(folder("qwen3"), tmp_path / "model")
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    read(copy)
    (copy / "model.safetensors").unlink()
    for reader in (
        read,
        lambda path: skeleton(str(path)),
        lambda path: processor(str(path), min_pixels=1, max_pixels=9),
    ):
        with pytest.raises(ConfigError, match=r"holds pytorch_model\.bin and no \*\.safetensors") as caught:
            reader(copy)
        assert "\n" not in str(caught.value)


def test_pickled_weights_of_the_hub_are_refused(folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Transformers' cache, where Transformers falls back to pickles."""
    cached = tmp_path / "models--some--model"
    shutil.copytree(folder("qwen3"), cached / "snapshots" / "0")
    weights = cached / "snapshots" / "0" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"some/model has no \*\.safetensors: pickled weights") as caught:
        read("some/model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("tied", "lost"), [(False, "lm_head.weight"), (True, "model.norm.weight")])
def test_a_missing_weight_is_refused(folder: Make, tmp_path: Path, tied: bool, lost: str) -> None:
    copy = shutil.copytree(folder("qwen3", tied=tied), tmp_path / "model")
    weights = load_file(copy / "model.safetensors")
    del weights[lost]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lack the weight {lost}: "):
        read(copy)


def test_a_weight_of_another_shape_is_refused(folder: Make, tmp_path: Path) -> None:
    copy = shutil.copytree(folder("qwen3"), tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ConfigError, match=r"is not a model that can be read|lack the weight"):
        read(copy)


def test_tied_models_need_no_second_copy_of_the_embedding(folder: Make) -> None:
    net = read(folder("qwen3_vl", tied=True))
    assert net.lm_head.weight is net.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(("vision", "projector"), [(False, False), (True, False), (False, True), (True, True)])
def test_frozen_parts_are_counted(net: Make, reader: Make, family: str, vision: bool, projector: bool) -> None:
    model, read = net(family, tied=True), reader(family)
    freeze(model, read, vision=vision, projector=projector)
    table = {part.group: part for part in trainable_table(model, read)}

    mergers = [p for name, p in model.named_parameters() if "visual" in name and "merger" in name]
    tower = sum(p.numel() for p in model.model.visual.parameters())
    merger = sum(p.numel() for p in mergers)
    assert table["projector"].total == merger > 0
    assert table["vision"].total == tower - merger > 0
    assert table["language"].total == sum(p.numel() for p in model.parameters()) - tower
    assert table["language"].trainable == table["language"].total
    assert table["vision"].trainable == (0 if vision else table["vision"].total)
    assert table["projector"].trainable == (0 if projector else merger)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trainable == sum(part.trainable for part in table.values())


def test_freezing_can_be_undone(net: Make, reader: Make) -> None:
    model = net("qwen2_5_vl")
    freeze(model, reader("qwen2_5_vl"), vision=True, projector=True)
    freeze(model, reader("qwen2_5_vl"), vision=False, projector=False)
    assert all(p.requires_grad for p in model.parameters())


def test_weights_in_4_bits_are_counted_dequantized_and_never_train(folder: Make, net: Make, reader: Make) -> None:
    read, path = reader("qwen2_5_vl"), str(folder("qwen2_5_vl"))
    bits = four_bit(Ds(load_in_4bit=True), read)
    model = load_model(path, dtype=torch.float32, attn_implementation="sdpa", four_bit=bits)
    freeze(model, read, vision=True, projector=True)
    table = {part.group: part for part in trainable_table(model, read)}
    whole = {part.group: part for part in trainable_table(net("qwen2_5_vl"), read)}
    # Two layers: q and o, k and v for one of two heads, three matrices of the MLP.
    quantized = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    assert {group: part.total for group, part in table.items()} == {group: part.total for group, part in whole.items()}
    assert table["language"].trainable == whole["language"].total - quantized
    assert table["vision"].trainable == table["projector"].trainable == 0


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_text", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_skeleton_has_the_names_shapes_and_layers_of_the_model_but_no_weights(
    folder: Make, family: str, tied: bool
) -> None:
    bones, model = skeleton(str(folder(family, tied=tied))), read(folder(family, tied=tied))
    shapes = [(name, p.shape) for name, p in model.named_parameters()]
    assert [(name, p.shape) for name, p in bones.named_parameters()] == shapes
    assert [name for name, _ in bones.named_modules()] == [name for name, _ in model.named_modules()]
    assert {tensor.device.type for tensor in (*bones.parameters(), *bones.buffers())} == {"meta"}
    assert type(bones) is type(model)


def test_a_skeleton_of_a_missing_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model that can be read"):
        skeleton(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no folder"):
        skeleton("./nowhere/model")


def test_a_model_that_is_stored_in_4_bits_is_refused(folder: Make, tmp_path: Path) -> None:
    copy = shutil.copytree(folder("qwen3"), tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    with pytest.raises(ConfigError, match=r"already quantized: name the original model") as caught:
        read(copy)
    assert "\n" not in str(caught.value)


def test_a_missing_weight_is_refused_in_4_bits(folder: Make, reader: Make, tmp_path: Path) -> None:
    copy = shutil.copytree(folder("qwen3"), tmp_path / "model")
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    bits = four_bit(Ds(load_in_4bit=True), reader("qwen3"))
    with pytest.raises(ConfigError, match=r"lack the weight model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(str(copy), dtype=torch.float32, attn_implementation="sdpa", four_bit=bits)


def test_freezing_a_missing_part_is_refused(net: Make, reader: Make) -> None:
    with pytest.raises(ConfigError, match=r"actor\.freeze_visual_encoder: the model has no vision parameters"):
        freeze(net("qwen3"), reader("qwen3"), vision=True, projector=False)


# ---------------------------------------------------------------- patch embeddings as products


def tower(**changes: Any) -> nn.Module:
    settings = {"kernel_size": (2, 3, 3), "stride": (2, 3, 3)} | changes
    return nn.ModuleDict({"patch_embed": nn.ModuleDict({"proj": nn.Conv3d(3, 5, **settings)})})


@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_convolution(bias: bool) -> None:
    torch.manual_seed(0)
    net = tower(bias=bias)
    layer = net.patch_embed.proj
    patches = torch.randn(7, 3, 2, 3, 3, requires_grad=True)
    expected = layer(patches)
    weights = torch.randn_like(expected)
    inputs = [patches, *layer.parameters()]
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    names = list(net.state_dict())
    project_patches(net)
    assert isinstance(layer, PatchProjection)
    assert list(net.state_dict()) == names
    output = layer(patches)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad((output * weights).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", [{"stride": (1, 3, 3)}, {"padding": 1}, {"dilation": (1, 2, 1)}])
def test_other_convolutions_stay_convolutions(change: dict[str, Any]) -> None:
    net = tower(**change)
    project_patches(net)
    assert type(net.patch_embed.proj) is nn.Conv3d


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_the_patch_embedding_of_every_family_is_a_product(net: Callable[..., Any], family: str) -> None:
    assert isinstance(net(family).base_model.visual.patch_embed.proj, PatchProjection)
