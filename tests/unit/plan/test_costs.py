"""Operations and bytes of models and batches, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vlmrl.config.verbs import RlConfig
from vlmrl.models.configured import ConfiguredModels
from vlmrl.plan.costs import Experts, Load, ModelCosts, bytes_between, forward_flops, train_flops
from vlmrl.plan.known import model_folder
from vlmrl.plan.planner import costs_of, nested
from vlmrl.plan.shapes import SHAPES, hub_id, published_name

COSTS = ModelCosts(
    parameters=200,
    trained=200,
    dense=100,
    output=50,
    experts=None,
    layers=2,
    hidden=4,
    attention=8,
    keys_and_values=4,
    patch=30,
    published=200,
)


def published(name: str, folder: Path, **settings: object) -> ModelCosts:
    given = {"actor.model_name_or_path": model_folder(name, folder), "data.prompt_dataset": "d", **settings}
    return costs_of(RlConfig.model_validate(nested(given)), ConfiguredModels())


def test_a_forward_pass_counts_matrices_outputs_and_attention() -> None:
    load = Load(tokens=10, pairs=55, outputs=4, patches=3)
    flops = forward_flops(COSTS, load)
    assert flops.language == 2 * 100 * 10 + 2 * 50 * 4 + 4 * 8 * 55
    assert flops.vision == 2 * 30 * 3


def test_bytes_between_matrices() -> None:
    costs = replace(COSTS, between=16, vocabulary=5)
    assert bytes_between(costs, Load(tokens=10, pairs=0, outputs=4)) == 2 * 16 * 10 + 24 * 5 * 4


def test_a_backward_pass_is_twice_a_forward_pass_and_checkpointing_one_more() -> None:
    load = Load(tokens=10, pairs=0, outputs=0)
    assert train_flops(COSTS, load, checkpoints=False) == 3 * 2000
    assert train_flops(COSTS, load, checkpoints=True) == 4 * 2000


def test_adapters_have_no_gradients_of_weights_and_a_frozen_tower_no_backward_pass() -> None:
    adapted = replace(COSTS, adapts=True, trains_vision=False)
    load = Load(tokens=10, pairs=0, outputs=0, patches=3)
    assert train_flops(adapted, load, checkpoints=False) == 2 * 2000 + 180


def test_a_token_meets_its_experts_and_a_batch_nearly_all() -> None:
    experts = Experts(count=8, per_token=2, parameters=80)
    assert experts.touched(1) == pytest.approx(0.25)
    assert experts.touched(2) == pytest.approx(1 - 0.75**2)
    assert replace(COSTS, experts=experts).per_token == 100 + 80 / 4


def test_llama_8b_by_hand(tmp_path: Path) -> None:
    costs = published("meta-llama/Llama-3.1-8B-Instruct", tmp_path)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert costs.dense == 32 * layer
    assert costs.output == 128256 * 4096
    assert costs.attention == 32 * 4096
    assert costs.kv_bytes == 2 * 32 * 8 * 128 * 2
    assert costs.published == costs.trained == costs.parameters == 8_030_261_248
    adapted = published("Llama-3.1-8B", tmp_path, **{"ds.lora.rank": 32})
    of_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert adapted.published == adapted.trained == 32 * 32 * of_layer


def test_an_expert_model_meets_a_fraction_of_its_parameters(tmp_path: Path) -> None:
    costs = published("Qwen3-30B-A3B", tmp_path)
    assert costs.experts is not None
    assert costs.experts.parameters == 48 * 128 * 3 * 2048 * 768
    assert costs.parameters == pytest.approx(30.53e9, rel=1e-3)
    # 3.3B with embedding and output layer, as the model card says.
    assert costs.per_token + 2 * costs.output == pytest.approx(3.3e9, rel=0.03)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen2.5-VL-3B", 3.755), ("Qwen3-VL-8B", 8.767), ("Qwen3-0.6B", 0.596), ("Llama-3.2-1B", 1.236)],
)
def test_shapes_have_the_published_numbers_of_parameters(name: str, billions: float, tmp_path: Path) -> None:
    assert published(name, tmp_path).parameters / 1e9 == pytest.approx(billions, abs=1e-3)


def test_names_of_models() -> None:
    assert published_name("Qwen/Qwen2.5-VL-72B-Instruct") == "Qwen2.5-VL-72B"
    assert published_name("qwen3-4b-instruct-2507") == "Qwen3-4B"
    assert published_name("my-model") is None
    assert hub_id("Qwen2.5-VL-72B") == "Qwen/Qwen2.5-VL-72B-Instruct"
    assert hub_id("Qwen3-8B") == "Qwen/Qwen3-8B"
    assert hub_id("./model") == "./model"
    assert hub_id("Llama-3-8B") == "meta-llama/Meta-Llama-3-8B"
    assert hub_id("Meta-Llama-3.1-8B") == "meta-llama/Meta-Llama-3.1-8B"
    assert all(published_name(hub_id(name)) == name for name in SHAPES)
