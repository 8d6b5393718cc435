"""What a vision patch costs, counted by hand from the matrices of micro models."""

from collections.abc import Callable
from typing import Any

import pytest

from vlmrl.models.cost import patch_cost
from vlmrl.models.load import freeze
from vlmrl.models.tiny import Family

Make = Callable[..., Any]

# Two layers of width 64 with an MLP of 96. q and o, then k and v for one of two heads (Qwen3-VL's text model has the
# same), then the three matrices of the MLP.
LANGUAGE = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
# Four patches of width 32 become one token of width 64.
MERGER = 128 * 128 + 128 * 64
BLOCK = 4 * 32 * 32
COUNTS: dict[Family, tuple[int, int]] = {
    # Patches of 2 x 14 x 14 x 3 numbers become 32; two blocks, whose MLP goes to 64 and back.
    "qwen2_vl": (3 * 2 * 14 * 14 * 32 + 2 * (BLOCK + 2 * 32 * 64), MERGER),
    # The MLP has a gate.
    "qwen2_5_vl": (3 * 2 * 14 * 14 * 32 + 2 * (BLOCK + 3 * 32 * 64), MERGER),
    # Larger patches, and a second merger for the first level. Its table of positions is looked up.
    "qwen3_vl": (3 * 2 * 16 * 16 * 32 + 2 * (BLOCK + 2 * 32 * 64), 2 * MERGER),
}


@pytest.mark.parametrize("family", COUNTS)
def test_a_patch_costs_what_its_matrices_do_and_a_quarter_of_the_projectors(
    net: Make, reader: Make, family: Family
) -> None:
    tower, projector = COUNTS[family]
    assert patch_cost(net(family), reader(family)) == pytest.approx((tower + projector / 4) / LANGUAGE)


@pytest.mark.parametrize(
    ("vision", "projector", "shares"),
    [(True, False, (1 / 3, 1)), (False, True, (1, 1 / 3)), (True, True, (1 / 3, 1 / 3))],
)
def test_what_does_not_train_costs_a_third(
    net: Make, reader: Make, vision: bool, projector: bool, shares: tuple[float, float]
) -> None:
    model, read = net("qwen2_5_vl"), reader("qwen2_5_vl")
    freeze(model, read, vision=vision, projector=projector)
    tower, merger = COUNTS["qwen2_5_vl"]
    wanted = (shares[0] * tower + shares[1] * merger / 4) / LANGUAGE
    assert patch_cost(model, read) == pytest.approx(wanted)


def test_a_frozen_model_costs_what_it_would_in_training_for_all_parts_alike(net: Make, reader: Make) -> None:
    model, read = net("qwen3_vl"), reader("qwen3_vl")
    training = patch_cost(model, read)
    model.requires_grad_(False)
    assert patch_cost(model, read) == pytest.approx(training)


def test_tied_embeddings_are_looked_up_all_the_same(net: Make, reader: Make) -> None:
    costs = {patch_cost(net("qwen2_5_vl", tied=tied), reader("qwen2_5_vl")) for tied in (False, True)}
    assert len(costs) == 1


def test_text_models_have_no_patches(net: Make, reader: Make) -> None:
    assert patch_cost(net("qwen3"), reader("qwen3")) == 0.0
