"""Targets of adapters, and plans that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from vlmrl.config.actor import Model
from vlmrl.config.lora import Lora
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, adapter_fingerprint, choose_targets, layers, plan_adapter
from vlmrl.models.tiny import Family
from vlmrl.models.weight_buckets import digest
from vlmrl.plugins import ParameterGroup, Processor

LANGUAGE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PLAN = AdapterPlan(
    rank=4,
    alpha=16.0,
    dropout=0.0,
    is_rank_stabilized=False,
    has_magnitude=False,
    targets=("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"),
    groups=frozenset({"language"}),
)


@pytest.fixture
def planned(folder: Callable[..., Path], reader: Callable[..., Processor]) -> Callable[..., AdapterPlan]:
    """`planned(family, *targets, frozen=...)`: the plan of a micro model's adapter."""

    def make(family: Family, *targets: str, frozen: tuple[ParameterGroup, ...] = (), tied: bool = False) -> AdapterPlan:
        lora = Lora(rank=4, target_modules=targets or ("all-linear",))
        model = Model(
            model_name_or_path=str(folder(family, tied=tied)),
            freeze_visual_encoder="vision" in frozen,
            freeze_projector="projector" in frozen,
        )
        plan = plan_adapter(model, lora, reader(family))
        assert plan is not None
        return plan

    return make


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3", "llama"])
def test_the_default_is_every_layer_of_the_language_model_but_the_output_layer(
    planned: Any, family: Family, tied: bool
) -> None:
    plan = planned(family, tied=tied)
    stem = "model.language_model.layers" if family.endswith("_vl") else "model.layers"
    ends = [f"self_attn.{name}" if name in LANGUAGE[:4] else f"mlp.{name}" for name in LANGUAGE]
    assert sorted(plan.targets) == sorted(f"{stem}.{i}.{end}" for i in range(2) for end in ends)
    assert plan.groups == {"language"}
    assert plan.suffixes == tuple(sorted(LANGUAGE))
    assert plan.fits_engine


@pytest.mark.parametrize("family", ["internvl", "gemma3"])
def test_the_default_leaves_towers_with_layers_of_the_same_names_alone(planned: Any, family: Family) -> None:
    plan = planned(family)
    ends = [f"self_attn.{name}" if name in LANGUAGE[:4] else f"mlp.{name}" for name in LANGUAGE]
    assert sorted(plan.targets) == sorted(f"model.language_model.layers.{i}.{end}" for i in range(2) for end in ends)
    assert plan.groups == {"language"}
    assert plan.fits_engine
    assert "vision" in planned(family, "vision").groups


def test_gate_and_up_in_one_matrix_are_sent_merged(planned: Any) -> None:
    plan = planned("glm4v")
    assert {name.rpartition(".")[2] for name in plan.targets} == {*LANGUAGE[:4], "gate_up_proj", "down_proj"}
    assert not plan.fits_engine
    assert planned("glm4v", "q_proj", "v_proj").fits_engine


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_text"])
def test_linear_attention_has_adapters_on_its_inputs_and_its_output(planned: Any, family: Family) -> None:
    plan = planned(family)
    stem = "model.language_model.layers" if family == "qwen3_5" else "model.layers"
    inputs = [f"in_proj_{name}" for name in ("qkv", "z", "b", "a")]
    layer = [target.removeprefix(f"{stem}.0.") for target in plan.targets if target.startswith(f"{stem}.0.")]
    assert sorted(layer) == sorted([*(f"linear_attn.{name}" for name in [*inputs, "out_proj"]), *MLP])
    assert sorted(target.rpartition(".")[2] for target in plan.targets if f"{stem}.1." in target) == sorted(LANGUAGE)
    assert planned(family, "in_proj_qkv", "out_proj").targets == (
        f"{stem}.0.linear_attn.out_proj",
        f"{stem}.0.linear_attn.in_proj_qkv",
    )


def test_vllm_takes_gates_of_linear_attention_only_with_its_other_inputs(planned: Any) -> None:
    assert planned("qwen3_5").fits_engine
    assert planned("qwen3_5", "in_proj_qkv").fits_engine
    assert planned("qwen3_5", "in_proj_b", "out_proj").fits_engine
    assert not planned("qwen3_5", "in_proj_z", "q_proj").fits_engine


def test_vision_selects_tower_and_projector_and_all_every_unfrozen_layer(planned: Any) -> None:
    vision, everything = planned("qwen2_5_vl", "vision"), planned("qwen2_5_vl", "all")
    assert vision.groups == {"vision", "projector"}
    assert all("visual" in name for name in vision.targets)
    assert not vision.fits_engine
    # Two blocks of qkv, proj, gate, up and down; two layers of the merger.
    assert len(vision.targets) == 2 * 5 + 2
    assert set(everything.targets) == {*vision.targets, *planned("qwen2_5_vl").targets}
    assert planned("qwen2_5_vl", "all", frozen=("vision", "projector")) == planned("qwen2_5_vl")
    assert planned("qwen2_5_vl", "all", frozen=("vision",)).groups == {"projector", "language"}
    assert planned("qwen2_5_vl", "all-linear", "vision") == everything
    assert planned("qwen3", "all") == planned("qwen3")


def test_the_skeleton_has_the_layers_of_the_model(net: Any, reader: Any, planned: Any) -> None:
    for family in ("qwen2_5_vl", "qwen3_vl", "qwen3"):
        model: PreTrainedModel = net(family)
        assert tuple(layers(model, reader(family))) == planned(family, "all").targets
        assert not any(name.endswith("lm_head") for name in planned(family, "all").targets)


def test_a_name_selects_layers_of_the_language_model_and_otherwise_of_the_tower(planned: Any) -> None:
    shared = planned("qwen2_5_vl", "gate_proj")
    assert shared.targets == tuple(f"model.language_model.layers.{i}.mlp.gate_proj" for i in range(2))
    assert planned("qwen2_5_vl", "layers.1.mlp.gate_proj").targets == shared.targets[1:]
    alone = planned("qwen2_5_vl", "qkv", "q_proj")
    assert alone.groups == {"vision", "language"}
    assert planned("qwen2_5_vl", "visual.blocks.1.mlp.gate_proj").targets == ("model.visual.blocks.1.mlp.gate_proj",)


@pytest.mark.parametrize(
    ("family", "targets", "frozen", "words"),
    [
        ("qwen3", ["q_prj"], (), "no linear layer q_prj that can have an adapter: did you mean q_proj?"),
        ("qwen3", ["all-linaer"], (), "did you mean all-linear?"),
        ("qwen3", ["xyz"], (), "there are all-linear, vision, all, or down_proj gate_proj"),
        # Names match whole components only.
        ("qwen3", ["proj"], (), "no linear layer proj"),
        ("qwen3", ["lm_head"], (), "no linear layer lm_head that can have an adapter"),
        ("qwen3", ["vision"], (), "the model has no vision tower"),
        ("qwen2_5_vl", ["vision"], ("vision",), r"vision selects model\.visual\.\S+ of the frozen vision tower"),
        ("qwen2_5_vl", ["vision"], ("projector",), "of the frozen projector.* actor.freeze_projector off"),
        ("qwen2_5_vl", ["q_proj", "qkv"], ("vision",), "qkv selects .* of the frozen vision tower"),
        ("qwen2_5_vl", ["q_proj"], ("vision", "projector"), None),
    ],
)
def test_targets_without_a_match_or_in_a_frozen_part_are_refused_in_one_line(
    planned: Any, family: Family, targets: list[str], frozen: tuple[ParameterGroup, ...], words: str | None
) -> None:
    if words is None:
        assert planned(family, *targets, frozen=frozen).groups == {"language"}
        return
    with pytest.raises(ConfigError, match=words) as caught:
        planned(family, *targets, frozen=frozen)
    assert str(caught.value).startswith("ds.lora.target_modules: ")
    assert "\n" not in str(caught.value)


def test_no_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="target_modules is empty"):
        choose_targets([], {"model.layers.0.q_proj": "language"}, frozen=())


def test_a_missing_model_is_named(reader: Any) -> None:
    with pytest.raises(ConfigError, match="there is no folder /nowhere/m"):
        plan_adapter(Model(model_name_or_path="/nowhere/m"), Lora(rank=1), reader("qwen3"))


def test_the_fingerprint_covers_matrices_and_scaling() -> None:
    tensors = {name: torch.full((2, 2), float(i)) for i, name in enumerate(PLAN.tensor_names)}
    digests = {name: digest(name, tensor) for name, tensor in tensors.items()}
    assert len(digests) == 4
    expected = adapter_fingerprint(digests, PLAN.scaling)
    assert adapter_fingerprint(dict(reversed(digests.items())), 4.0) == expected
    assert adapter_fingerprint(digests, 4.0 * 2**0.5) != expected
    assert adapter_fingerprint({name: digests[name] for name in list(digests)[1:]}, 4.0) != expected
