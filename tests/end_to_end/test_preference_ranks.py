"""Real DeepSpeed on CPU: a step on preferences does not depend on how its pairs are laid out and divided. All losses,
without DeepSpeed: unit/learning/test_preferences.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks

LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "dpo", "label_smoothing": 0.1, "nll_coef": 0.5},
    "mpo": {"kind": "mpo", "nll_coef": 1.0},
    "kto": {"kind": "kto", "kto_weights": (1.0, 0.7)},
}
ALONE = {"layout": "padded", "max_tokens": 1}
"""One pair, or one response, per micro-batch."""
PACKED = {"layout": "packed", "max_tokens": 150}
SHARED = {"layout": "shared", "max_tokens": 10_000}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    from vlmrl.models.tiny import build

    folder = tmp_path_factory.mktemp("runs")
    vl = str(build("qwen2_5_vl", folder / "vl", size="micro", seed=3))
    text = str(build("qwen3", folder / "text", size="micro", seed=3))
    ranks = Ranks(folder, Path(__file__).with_name("preference_rank.py"))
    for name, loss in LOSSES.items():
        ranks.add(f"{name}", "prefer", model=vl, loss=loss, **ALONE)
    ranks.add("dpo_shared", "prefer", model=vl, loss=LOSSES["dpo"], **SHARED)
    ranks.add("dpo_packed", "prefer", model=vl, loss=LOSSES["dpo"], **PACKED)
    ranks.add("text", "prefer", model=text, loss=LOSSES["dpo"], **ALONE)
    ranks.add("text_shared", "prefer", model=text, loss=LOSSES["dpo"], **SHARED)
    ranks.add("lora", "prefer", model=vl, loss=LOSSES["dpo"], lora={"rank": 4}, **ALONE)
    ranks.add("four_bits", "four_bits", model=vl, max_tokens=10_000)
    ranks.run(1)
    for name, loss in LOSSES.items():
        ranks.add(f"{name}_pair", "prefer", model=vl, loss=loss, stage=3, **SHARED)
    ranks.add("dpo_pair_many", "prefer", model=vl, loss=LOSSES["dpo"], stage=2, **PACKED)
    ranks.add("text_pair", "prefer", model=text, loss=LOSSES["dpo"], stage=2, **SHARED)
    ranks.add("lora_pair", "prefer", model=vl, loss=LOSSES["dpo"], lora={"rank": 4}, stage=2, **SHARED)
    ranks.run(2)
    return ranks


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("dpo", "dpo_shared"),
        ("dpo", "dpo_packed"),
        ("dpo", "dpo_pair_many"),
        ("text", "text_shared"),
        ("text", "text_pair"),
        ("lora", "lora_pair"),
        *((name, f"{name}_pair") for name in LOSSES),
    ],
)
def test_the_step_does_not_depend_on_layout_and_ranks(runs: Ranks, one: str, other: str) -> None:
    runs.assert_close(one, other, 1e-5)
    for mine, theirs in zip(runs.json(one), runs.json(other), strict=True):
        same = {name for name in mine if name.startswith("dpo/")} | {"policy/loss", "policy/grad_norm"}
        assert {name: mine[name] for name in same} == pytest.approx({name: theirs[name] for name in same}, abs=2e-5)


@pytest.mark.parametrize("kind", ["dpo", "mpo"])
def test_a_step_raises_the_margin(runs: Ranks, kind: str) -> None:
    first, second = runs.json(kind)
    assert second["dpo/margin"] > first["dpo/margin"]
    assert second["policy/loss"] < first["policy/loss"]


def test_judged_responses_have_rewards_but_no_margin(runs: Ranks) -> None:
    first, second = runs.json("kto")
    assert "dpo/margin" not in first
    gaps = [line["dpo/reward_chosen"] - line["dpo/reward_rejected"] for line in (first, second)]
    assert gaps[1] > gaps[0]


def test_adapters_on_four_bits_learn_against_their_base_as_on_its_numbers(runs: Ranks) -> None:
    result = runs.json("four_bits")
    assert result["bits"] > 10
    assert result["changed"] == result["trained_base"] == result["frozen_adapters"] == []
    assert result["moved_reference"] == 0.0
    first, second = result["steps"]
    assert first["policy/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["dpo/margin"] == pytest.approx(0.0, abs=1e-5)
    assert second["dpo/margin"] > 1e-4
    same = {name for name in first if name.startswith("dpo/")} | {"policy/loss", "policy/grad_norm"}
    for mine, theirs in zip(result["steps"], result["as_numbers"], strict=True):
        assert {name: mine[name] for name in same} == pytest.approx({name: theirs[name] for name in same}, abs=2e-5)
    assert {name: result["resumed"][name] for name in same} == {name: second[name] for name in same}
