"""Adapters in folders: PEFT's format, refused folders, and the fingerprint of the base."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import plan_for, randomize
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from vlmrl.errors import ConfigError
from vlmrl.models.adapter_files import (
    Base,
    base_fingerprint,
    check_base,
    load_adapter_tensors,
    read_adapter,
    write_adapter,
)
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.adapters import adapter_tensors, delta, inject_adapter
from vlmrl.models.load import load_model
from vlmrl.models.tiny import Family, build

Make = Callable[..., Any]


@pytest.fixture
def saved_adapter(net: Make, reader: Make, folder: Make, tmp_path: Path) -> Make:
    """`saved_adapter(family, **lora)`: an adapted model, its plan, and the folder of its adapter."""

    def make(family: Family, *targets: str, **lora: Any) -> tuple[PreTrainedModel, AdapterPlan, Path]:
        model = net(family)
        plan = plan_for(model, reader(family), *targets, **lora)
        inject_adapter(model, plan)
        randomize(model)
        base = Base(str(folder(family)), base_fingerprint(str(folder(family))), is_four_bit=False)
        write_adapter(tmp_path / "adapter", plan, adapter_tensors(model), base=base)
        return model, plan, tmp_path / "adapter"

    return make


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True, "alpha": 7.0}, {"use_dora": True}])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3"])
def test_peft_loads_the_folder_with_equal_log_probs(
    saved_adapter: Make, net: Make, logprobs_of: Make, family: Family, lora: dict[str, Any]
) -> None:
    from peft import PeftModel

    model, plan, out = saved_adapter(family, "all", **lora)
    expected = logprobs_of(model, family)
    loaded = PeftModel.from_pretrained(net(family), out)
    torch.testing.assert_close(logprobs_of(loaded.base_model.model, family), expected, atol=1e-6, rtol=0.0)
    adapted = {name for name, module in loaded.base_model.model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == set(plan.targets)


def test_an_adapter_is_read_back_unchanged(
    saved_adapter: Make, net: Make, reader: Make, logprobs_of: Make, folder: Make
) -> None:
    model, plan, out = saved_adapter("qwen2_5_vl", "all", use_dora=True, use_rslora=True)
    stored = read_adapter(out, flag="merge.adapter")
    assert (stored.rank, stored.alpha, stored.scaling) == (4, 16.0, 8.0)
    assert stored.is_rank_stabilized
    assert stored.has_magnitude
    assert stored.targets == plan.targets
    assert stored.base.path == str(folder("qwen2_5_vl"))
    parameters = dict(adapter_tensors(model))
    assert stored.tensors.keys() == parameters.keys()
    assert all(torch.equal(stored.tensors[name], parameters[name]) for name in parameters)
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            torch.testing.assert_close(stored.delta(name, layer.base_layer.weight), delta(layer))
    fresh = net("qwen2_5_vl")
    inject_adapter(fresh, plan)
    load_adapter_tensors(fresh, plan, stored, folder=str(out))
    assert torch.equal(logprobs_of(fresh, "qwen2_5_vl"), logprobs_of(model, "qwen2_5_vl"))


def test_adapters_of_other_programs_are_read(saved_adapter: Make) -> None:
    _, plan, out = saved_adapter("qwen3")
    (out / "base.json").unlink()
    stored = read_adapter(out, flag="merge.adapter")
    assert set(stored.targets) == set(plan.targets)
    assert stored.base.fingerprint is None
    check_base(stored, "wherever", folder=out, flag="merge.adapter")


@pytest.mark.parametrize("end", ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"])
def test_a_missing_tensor_is_named(saved_adapter: Make, end: str) -> None:
    _, plan, out = saved_adapter("qwen3", use_dora=True)
    tensors = load_file(out / "adapter_model.safetensors")
    missing = f"base_model.model.{plan.targets[3]}.{end}"
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, out / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"lacks the tensor {re.escape(missing)}: it is damaged"):
        read_adapter(out, flag="merge.adapter")


def test_a_missing_layer_is_named(saved_adapter: Make) -> None:
    _, plan, out = saved_adapter("qwen3")
    tensors = load_file(out / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if plan.targets[3] not in name}
    save_file(kept, out / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"lacks the tensor .*{re.escape(plan.targets[3])}"):
        read_adapter(out, flag="merge.adapter")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "its peft_type is IA3; vlmrl supports LORA only"),
        ({"rank_pattern": {"q_proj": 8}}, "uses PEFT's rank_pattern"),
        ({"bias": "all"}, "uses PEFT's bias"),
        (None, "there is no adapter in .*: it holds no adapter_config.json"),
        ("{", "cannot be read: Expecting property name"),
        ("weights", "cannot be read"),
    ],
)
def test_a_folder_without_a_supported_adapter_is_refused(
    saved_adapter: Make, change: dict[str, Any] | str | None, words: str
) -> None:
    _, _, out = saved_adapter("qwen3")
    config = out / "adapter_config.json"
    if change is None:
        config.unlink()
    elif change == "weights":
        (out / "adapter_model.safetensors").write_bytes(b"nothing")
    elif isinstance(change, str):
        config.write_text(change)
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ConfigError, match=words) as caught:
        read_adapter(out, flag="actor.adapter_name_or_path")
    assert str(caught.value).startswith("actor.adapter_name_or_path: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 8}, "has ds.lora.rank 4, this run has 8: set it to 4"),
        ({"alpha": 8.0}, "has ds.lora.alpha 16.0, this run has 8.0"),
        ({"use_rslora": True}, "has ds.lora.use_rslora False"),
        ({"use_dora": True}, "has ds.lora.use_dora False"),
        ({"target_modules": ("q_proj",)}, "is for other layers: 24 tensors differ"),
    ],
)
def test_a_run_does_not_start_from_an_adapter_of_another_kind(
    saved_adapter: Make, net: Make, reader: Make, lora: dict[str, Any], words: str
) -> None:
    _, _, out = saved_adapter("qwen3")
    model = net("qwen3")
    plan = plan_for(model, reader("qwen3"), **lora)
    inject_adapter(model, plan)
    with pytest.raises(ConfigError, match=words):
        load_adapter_tensors(model, plan, read_adapter(out, flag="merge.adapter"), folder=str(out))


# ---------------------------------------------------------------- the base of an adapter


def test_an_adapter_matches_its_base_however_the_files_are_split(
    saved_adapter: Make, folder: Make, tmp_path: Path
) -> None:
    _, _, out = saved_adapter("qwen3")
    stored = read_adapter(out, flag="merge.adapter")
    net = load_model(str(folder("qwen3")), dtype=torch.float32, attn_implementation=None)
    net.save_pretrained(tmp_path / "cut", max_shard_size="100KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    check_base(stored, str(tmp_path / "cut"), folder=out, flag="merge.adapter")
    other = build("qwen3", tmp_path / "other", size="micro", seed=1)
    with pytest.raises(ConfigError, match="trained on other weights than those of") as caught:
        check_base(stored, str(other), folder=out, flag="merge.adapter")
    assert "\n" not in str(caught.value)


def test_any_changed_tensor_makes_another_base(folder: Make, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder("qwen2_5_vl"), copy)
    fingerprint = base_fingerprint(str(copy))
    assert fingerprint == base_fingerprint(str(folder("qwen2_5_vl")))
    tensors = load_file(copy / "model.safetensors")
    for change in (
        {name: tensor + 1e-3 * (i == 30) for i, (name, tensor) in enumerate(tensors.items())},
        {name: tensor.bfloat16() for name, tensor in tensors.items()},
        {f"{name}x" if i == 0 else name: tensor for i, (name, tensor) in enumerate(tensors.items())},
    ):
        save_file(change, copy / "model.safetensors")
        assert base_fingerprint(str(copy)) != fingerprint


def test_a_base_without_safetensors_is_refused(folder: Make, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder("qwen3"), copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        base_fingerprint(str(copy))
