"""Adapters in a model and in a folder: exactly the planned layers, nothing at first, PEFT's own format."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.config.lora import Lora
from vlmrl.data.packing import make_pack
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, choose_targets, layers
from vlmrl.models.adapters import (
    Base,
    adapter_tensors,
    adapters_off,
    base_fingerprint,
    check_base,
    delta,
    exactly,
    inject,
    low_rank_delta,
    read_adapter,
    set_tensors,
    write_adapter,
)
from vlmrl.models.inputs import model_inputs
from vlmrl.models.load import freeze, load_model
from vlmrl.models.scorer import Scorer
from vlmrl.models.tiny import Family, build
from vlmrl.plugins import Processor

FAMILIES: list[Family] = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3", "llama"]
Make = Callable[..., Any]


def plan_for(net: PreTrainedModel, reader: Processor, *targets: str, **lora: Any) -> AdapterPlan:
    settings = Lora.model_validate({"rank": 4, "alpha": 16.0, "target_modules": targets or ("all-linear",)} | lora)
    found = choose_targets(settings.target_modules, layers(net, reader), frozen=())
    return AdapterPlan(
        rank=settings.rank,
        alpha=settings.alpha,
        dropout=settings.dropout,
        is_rank_stabilized=settings.use_rslora,
        has_magnitude=settings.use_dora,
        targets=tuple(found),
        groups=frozenset(found.values()),
    )


def learn(net: PreTrainedModel) -> None:
    """As if it had trained: every B and every magnitude is something."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapter_tensors(net):
            if "lora_A" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.fixture
def says(reader: Make, sample: Make) -> Callable[[PreTrainedModel, Family], Tensor]:
    """`says(model, family)`: its log-probs of a fixed sample, with an image where it takes one."""

    def ask(net: PreTrainedModel, family: Family) -> Tensor:
        pack = make_pack([sample(family, 1 if family.endswith("_vl") else 0, 1)], [0], "padded")
        with torch.no_grad():
            return Scorer(net).eval()(model_inputs(net, reader(family), pack)).logprobs

    return ask


# ---------------------------------------------------------------- in a model


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        (family, targets)
        for family in FAMILIES
        for targets in ("all-linear", "vision", "all", "q_proj")
        if targets != "vision" or family.endswith("_vl")
    ],
)
def test_the_planned_layers_and_no_others_train(net: Make, reader: Make, family: Family, targets: str) -> None:
    model = net(family)
    names = [name for name, _ in model.named_parameters()]
    plan = plan_for(model, reader(family), targets)
    inject(model, plan)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains == {f"{target}.{half}.default.weight" for target in plan.targets for half in ("lora_A", "lora_B")}
    assert [name for name, _ in adapter_tensors(model)] == list(plan.tensor_names)
    assert {id(p) for _, p in adapter_tensors(model)} == {id(p) for p in model.parameters() if p.requires_grad}
    # The base is what it was, under the names that it had.
    assert [n.replace(".base_layer.", ".") for n, p in model.named_parameters() if not p.requires_grad] == names
    assert isinstance(model.get_output_embeddings(), nn.Linear)


@pytest.mark.parametrize("how", [{}, {"use_rslora": True}, {"use_dora": True}, {"dropout": 0.5}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_adds_nothing_and_off_is_the_base_to_the_bit(
    net: Make, reader: Make, says: Make, family: Family, how: dict[str, Any]
) -> None:
    model = net(family)
    before = says(model, family)
    inject(model, plan_for(model, reader(family), "all", **how))
    torch.testing.assert_close(says(model, family), before, atol=2e-5 if "use_dora" in how else 0.0, rtol=0.0)
    learn(model)
    assert (says(model, family) - before).abs().max() > 1e-3
    on = says(model, family)
    for _ in range(2):
        with adapters_off(model):
            assert torch.equal(says(model, family), before)
            assert all(p.requires_grad for _, p in adapter_tensors(model))
        assert torch.equal(says(model, family), on)


def test_off_ends_when_a_pass_dies(net: Make, reader: Make, says: Make) -> None:
    model = net("qwen3")
    inject(model, plan_for(model, reader("qwen3")))
    learn(model)
    on = says(model, "qwen3")
    with pytest.raises(ZeroDivisionError), adapters_off(model):
        raise ZeroDivisionError
    assert torch.equal(says(model, "qwen3"), on)


def test_the_matrices_have_the_dtype_of_the_model(net: Make, reader: Make) -> None:
    model = net("qwen3").bfloat16()
    inject(model, plan_for(model, reader("qwen3"), use_dora=True))
    assert {p.dtype for _, p in adapter_tensors(model)} == {torch.bfloat16}
    assert len(adapter_tensors(model)) == 14 * 3


def test_a_frozen_part_and_a_layer_of_another_model_get_no_adapter(net: Make, reader: Make) -> None:
    model, read = net("qwen2_5_vl"), reader("qwen2_5_vl")
    plan = plan_for(model, read, "all")
    freeze(model, read, vision=True, projector=False)
    with pytest.raises(ConfigError, match=r"model\.visual\.blocks\.0\.attn\.qkv is frozen"):
        inject(model, plan)
    with pytest.raises(ConfigError, match=r"a layer model\.visual\..*, which Qwen3ForCausalLM has not"):
        inject(net("qwen3"), plan)


def test_one_expression_matches_the_targets_and_nothing_else() -> None:
    names = ["a.layers.0.q", "a.layers.0.k", "a.layers.10.q", "a.layers.10.k", "a.layers.2.q", "b.mlp.0", "head"]
    pattern = exactly(names)
    assert all(re.fullmatch(pattern, name) for name in names)
    others = ["a.layers.1.q", "a.layers.2.k", "a.layers.100.q", "x.a.layers.0.q", "aXlayers.0.q", "b.mlp.1", "headed"]
    assert not any(re.fullmatch(pattern, name) for name in others)
    assert exactly(["a.0.q", "a.0.k", "a.1.q", "a.1.k"]) == r"a\.(?:0|1)(?:\.q|\.k)"


# ---------------------------------------------------------------- what it adds


def test_what_an_adapter_adds_by_hand() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [0.0]])
    weight = torch.tensor([[0.0, -8.0], [3.0, 4.0]])
    assert low_rank_delta(a, b, scaling=2.0, weight=weight).tolist() == [[6.0, 12.0], [0.0, 0.0]]
    # The sum is [[6, 4], [3, 4]]; its rows are sqrt(52) and 5 long, and are to be 2 sqrt(13) and 10 long.
    magnitude = torch.tensor([52.0**0.5, 10.0])
    added = low_rank_delta(a, b, scaling=2.0, weight=weight, magnitude=magnitude)
    torch.testing.assert_close(weight + added, torch.tensor([[6.0, 4.0], [6.0, 8.0]]))


@pytest.mark.parametrize("how", [{}, {"use_rslora": True}, {"use_dora": True}])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_the_base_and_what_is_added_says_what_the_adapted_model_says(
    net: Make, reader: Make, says: Make, family: Family, how: dict[str, Any]
) -> None:
    model, merged = net(family), net(family)
    inject(model, plan_for(model, reader(family), "all", **how))
    learn(model)
    own = dict(merged.named_parameters())
    with torch.no_grad():
        for name, layer in model.named_modules():
            if hasattr(layer, "lora_A"):
                own[f"{name}.weight"] += delta(layer)
    torch.testing.assert_close(says(merged, family), says(model, family), atol=5e-5, rtol=0.0)


# ---------------------------------------------------------------- in a folder


@pytest.fixture
def written(net: Make, reader: Make, folder: Make, tmp_path: Path) -> Make:
    """`written(family, **lora)`: an adapted model, its plan, and the folder that its adapter was written to."""

    def make(family: Family, *targets: str, **lora: Any) -> tuple[PreTrainedModel, AdapterPlan, Path]:
        model = net(family)
        plan = plan_for(model, reader(family), *targets, **lora)
        inject(model, plan)
        learn(model)
        base = Base(str(folder(family)), base_fingerprint(str(folder(family))), is_four_bit=False)
        write_adapter(tmp_path / "adapter", plan, adapter_tensors(model), base=base)
        return model, plan, tmp_path / "adapter"

    return make


@pytest.mark.parametrize("how", [{}, {"use_rslora": True, "alpha": 7.0}, {"use_dora": True}])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_peft_loads_the_folder_and_says_the_same(
    written: Make, net: Make, says: Make, family: Family, how: dict[str, Any]
) -> None:
    from peft import PeftModel

    model, plan, out = written(family, "all", **how)
    expected = says(model, family)
    loaded = PeftModel.from_pretrained(net(family), out)
    torch.testing.assert_close(says(loaded.base_model.model, family), expected, atol=1e-6, rtol=0.0)
    adapted = {name for name, module in loaded.base_model.model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == set(plan.targets)


def test_the_folder_is_read_back_as_it_was(written: Make, net: Make, reader: Make, says: Make, folder: Make) -> None:
    model, plan, out = written("qwen2_5_vl", "all", use_dora=True, use_rslora=True)
    stored = read_adapter(out, flag="merge.adapter")
    assert (stored.rank, stored.alpha, stored.scaling) == (4, 16.0, 8.0)
    assert stored.is_rank_stabilized
    assert stored.has_magnitude
    assert stored.targets == plan.targets
    assert stored.base.path == str(folder("qwen2_5_vl"))
    own = dict(adapter_tensors(model))
    assert stored.tensors.keys() == own.keys()
    assert all(torch.equal(stored.tensors[name], own[name]) for name in own)
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            torch.testing.assert_close(stored.delta(name, layer.base_layer.weight), delta(layer))
    fresh = net("qwen2_5_vl")
    inject(fresh, plan)
    set_tensors(fresh, plan, stored, folder=str(out))
    assert torch.equal(says(fresh, "qwen2_5_vl"), says(model, "qwen2_5_vl"))


def test_peft_folders_of_others_are_read_too(written: Make) -> None:
    _, plan, out = written("qwen3")
    (out / "base.json").unlink()
    stored = read_adapter(out, flag="merge.adapter")
    assert set(stored.targets) == set(plan.targets)
    assert stored.base.fingerprint is None
    check_base(stored, "wherever", folder=out, flag="merge.adapter")


@pytest.mark.parametrize("end", ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"])
def test_a_lost_tensor_is_named(written: Make, end: str) -> None:
    _, plan, out = written("qwen3", use_dora=True)
    tensors = load_file(out / "adapter_model.safetensors")
    lost = f"base_model.model.{plan.targets[3]}.{end}"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, out / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"lacks the tensor {re.escape(lost)}: it is damaged"):
        read_adapter(out, flag="merge.adapter")


def test_a_layer_that_is_lost_whole_is_named(written: Make) -> None:
    _, plan, out = written("qwen3")
    tensors = load_file(out / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if plan.targets[3] not in name}
    save_file(kept, out / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"lacks the tensor .*{re.escape(plan.targets[3])}"):
        read_adapter(out, flag="merge.adapter")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "its kind is IA3, and vlmrl knows LORA alone"),
        ({"rank_pattern": {"q_proj": 8}}, "made with PEFT's rank_pattern"),
        ({"bias": "all"}, "made with PEFT's bias"),
        (None, "there is no adapter in .*: it holds no adapter_config.json"),
        ("{", "cannot be read: Expecting property name"),
        ("weights", "cannot be read"),
    ],
)
def test_a_folder_that_holds_no_adapter_of_ours_is_refused(
    written: Make, change: dict[str, Any] | str | None, words: str
) -> None:
    _, _, out = written("qwen3")
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
def test_a_run_does_not_go_on_from_an_adapter_of_another_make(
    written: Make, net: Make, reader: Make, lora: dict[str, Any], words: str
) -> None:
    _, _, out = written("qwen3")
    model = net("qwen3")
    plan = plan_for(model, reader("qwen3"), **lora)
    inject(model, plan)
    with pytest.raises(ConfigError, match=words):
        set_tensors(model, plan, read_adapter(out, flag="merge.adapter"), folder=str(out))


# ---------------------------------------------------------------- whose it is


def test_an_adapter_knows_its_base_however_the_files_are_cut(written: Make, folder: Make, tmp_path: Path) -> None:
    _, _, out = written("qwen3")
    stored = read_adapter(out, flag="merge.adapter")
    net = load_model(str(folder("qwen3")), dtype=torch.float32, attn_implementation=None)
    net.save_pretrained(tmp_path / "cut", max_shard_size="100KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    check_base(stored, str(tmp_path / "cut"), folder=out, flag="merge.adapter")
    other = build("qwen3", tmp_path / "other", size="micro", seed=1)
    with pytest.raises(ConfigError, match="trained on other weights than those of") as caught:
        check_base(stored, str(other), folder=out, flag="merge.adapter")
    assert "\n" not in str(caught.value)


def test_one_changed_tensor_anywhere_makes_another_base(folder: Make, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder("qwen2_5_vl"), copy)
    own = base_fingerprint(str(copy))
    assert own == base_fingerprint(str(folder("qwen2_5_vl")))
    tensors = load_file(copy / "model.safetensors")
    for change in (
        {name: tensor + 1e-3 * (i == 30) for i, (name, tensor) in enumerate(tensors.items())},
        {name: tensor.bfloat16() for name, tensor in tensors.items()},
        {f"{name}x" if i == 0 else name: tensor for i, (name, tensor) in enumerate(tensors.items())},
    ):
        save_file(change, copy / "model.safetensors")
        assert base_fingerprint(str(copy)) != own


def test_a_base_without_safetensors_is_refused(folder: Make, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder("qwen3"), copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        base_fingerprint(str(copy))
