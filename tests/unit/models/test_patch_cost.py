"""Cost of a vision patch, counted by hand from the matrices of micro models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vlmrl.config.ds import Ds
from vlmrl.models.load import freeze, load_model
from vlmrl.models.patch_cost import patch_cost
from vlmrl.models.quantize import four_bit
from vlmrl.models.tiny import Family

Make = Callable[..., Any]

# Two layers of width 64 with an MLP of 96. q and o, then k and v for one of two heads (Qwen3-VL's text model has the
# same), then the three matrices of the MLP.
LANGUAGE = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
# Four patches of width 32 become one token of width 64.
MERGER = 128 * 128 + 128 * 64
BLOCK = 4 * 32 * 32
COUNTS: dict[Family, tuple[int, int]] = {
    # Patches of 2 x 14 x 14 x 3 values are mapped to 32; two blocks, with an MLP from 32 to 64 and back.
    "qwen2_vl": (3 * 2 * 14 * 14 * 32 + 2 * (BLOCK + 2 * 32 * 64), MERGER),
    # The MLP has a gate.
    "qwen2_5_vl": (3 * 2 * 14 * 14 * 32 + 2 * (BLOCK + 3 * 32 * 64), MERGER),
    # Larger patches, and a second merger for deepstack. Position embeddings are not counted.
    "qwen3_vl": (3 * 2 * 16 * 16 * 32 + 2 * (BLOCK + 2 * 32 * 64), 2 * MERGER),
}


@pytest.mark.parametrize("family", COUNTS)
def test_a_patch_costs_its_matrices_and_a_quarter_of_the_projector(net: Make, reader: Make, family: Family) -> None:
    tower, projector = COUNTS[family]
    assert patch_cost(net(family), reader(family)) == pytest.approx((tower + projector / 4) / LANGUAGE)


@pytest.mark.parametrize(
    ("vision", "projector", "shares"),
    # The gradient passes through a frozen projector to a trainable tower.
    [(True, False, (1 / 3, 1)), (False, True, (1, 2 / 3)), (True, True, (1 / 3, 1 / 3))],
)
def test_frozen_parts_cost_one_third_or_two_thirds_if_a_gradient_passes_through(
    net: Make, reader: Make, vision: bool, projector: bool, shares: tuple[float, float]
) -> None:
    model, read = net("qwen2_5_vl"), reader("qwen2_5_vl")
    freeze(model, read, vision=vision, projector=projector)
    tower, merger = COUNTS["qwen2_5_vl"]
    wanted = (shares[0] * tower + shares[1] * merger / 4) / LANGUAGE
    assert patch_cost(model, read) == pytest.approx(wanted)


def test_if_all_parts_are_frozen_the_ratio_is_that_of_training(net: Make, reader: Make) -> None:
    model, read = net("qwen3_vl"), reader("qwen3_vl")
    training = patch_cost(model, read)
    model.requires_grad_(False)
    assert patch_cost(model, read) == pytest.approx(training)


@pytest.mark.parametrize("bits", [False, True])
def test_with_adapters_the_base_costs_two_thirds_and_adapters_their_full_size(
    folder: Make, reader: Make, bits: bool
) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    read = reader("qwen2_5_vl")
    bits_options = four_bit(Ds(load_in_4bit=bits), read)
    model = load_model(
        str(folder("qwen2_5_vl")), dtype=torch.float32, attn_implementation="sdpa", four_bit=bits_options
    )
    inject_adapter_in_model(LoraConfig(r=4, target_modules=r".*language_model.*\.(q|v)_proj"), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    # Two layers; q goes from 64 to 64, v from 64 to 32.
    adapters = 2 * 4 * (64 + 64 + 64 + 32)
    tower, merger = COUNTS["qwen2_5_vl"]
    wanted = (tower + merger / 4) / 3 / (LANGUAGE * 2 / 3 + adapters)
    assert patch_cost(model, read) == pytest.approx(wanted)


def test_tied_embeddings_are_not_counted(net: Make, reader: Make) -> None:
    costs = {patch_cost(net("qwen2_5_vl", tied=tied), reader("qwen2_5_vl")) for tied in (False, True)}
    assert len(costs) == 1


def test_text_models_have_no_patches(net: Make, reader: Make) -> None:
    assert patch_cost(net("qwen3"), reader("qwen3")) == 0.0
