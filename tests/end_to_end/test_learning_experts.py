"""Experts spread over the ranks, under real DeepSpeed on CPU: ranks take the step of one that has all experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learning_rank import PACKED, PADDED, SHARED
from ranks import Ranks
from transformers import AutoModelForCausalLM

MANY = SHARED | {"max_tokens": 120}
STEPS: dict[str, dict[str, Any]] = {
    "vl_3": {"cut": SHARED, "stage": 3, "prove": True},
    "text_2": {"cut": PACKED, "stage": 2},
}
MORE: dict[str, dict[str, Any]] = {
    "vl_1": {"cut": SHARED, "stage": 1},
    "vl_2": {"cut": PADDED, "stage": 2, "prove": True},
    "text_1": {"cut": MANY, "stage": 1},
    "text_3": {"cut": MANY, "stage": 3},
    "vl_recomputed": {"cut": SHARED, "stage": 3, "gradient_checkpointing_enable": True},
    "text_eager": {"cut": PADDED, "stage": 2, "max_norm": 0.0},
}
"""Of `make prove`."""
FOUR = {"vl_pairs_2": {"cut": SHARED, "stage": 2}, "text_pairs_3": {"cut": MANY, "stage": 3}}
"""On four ranks in two groups, also of `make prove`."""
MODELS = {"vl": "qwen3_vl_moe", "text": "qwen3_moe"}


@pytest.fixture(scope="module")
def runs(proves: bool, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Results of all jobs: one rank, two, and with `prove` two that resume, and four."""
    from vlmrl.models.tiny import build

    folder = tmp_path_factory.mktemp("runs")
    ranks = Ranks(folder, Path(__file__).with_name("critic_rank.py"))
    given: dict[str, dict[str, Any]] = {}
    for name, family in MODELS.items():
        model = str(build(family, folder / f"{name}_model", size="micro", seed=3))  # type: ignore[arg-type]
        given[name] = {"model": model, "old": str(folder / f"{name}.npz")}
        ranks.add(name, "score", model=model)
        ranks.add(f"{name}_alone", "update", **given[name], cut=PADDED)
    if proves:
        ranks.add("text_free", "update", **given["text"], cut=PADDED, max_norm=0.0)
        ranks.add("value_alone", "value", **given["vl"], cut="padded_many")
    ranks.run(1)
    for name, options in (STEPS | (MORE if proves else {})).items():
        save = str(folder / "saved") if name == "text_2" else None
        ranks.add(name, "update", **given[name.partition("_")[0]], **options, experts=2, save=save)
    for stage in (1, 2, 3) if proves else (2,):
        ranks.add(f"unbroken_{stage}", "unbroken", **given["text"], **resumed(folder, stage))
    if proves:
        for stage in (2, 3):
            ranks.add(f"value_{stage}", "value", **given["vl"], cut="shared_one", stage=stage, experts=2)
        balance = {"cut": SHARED, "stage": 2, "aux_loss_coef": 0.5}
        ranks.add("balanced", "update", **given["vl"], **balance, experts=2)
        ranks.add("balanced_whole", "update", **given["vl"], **balance)
        for name, spread in (("bf16", 2), ("bf16_whole", 1)):
            ranks.add(name, "update", **given["text"], cut=PACKED, stage=2, dtype="bf16", experts=spread)
        average = {"cut": PACKED, "stage": 2, "ema_beta": 0.5}
        ranks.add("mean", "update", **given["text"], **average, experts=2, save=str(folder / "mean_saved"))
        ranks.add("mean_whole", "update", **given["text"], **average, save=str(folder / "whole_saved"))
    if proves:
        ranks.run(2)  # other processes continue
    for stage in (1, 2, 3) if proves else (2,):
        ranks.add(f"continued_{stage}", "continued", **given["text"], **resumed(folder, stage))
    ranks.add("unspread", "fails", task="continued", **given["text"], **resumed(folder, 2) | {"experts": 1})
    ranks.run(2)
    if proves:
        for name, options in FOUR.items():
            ranks.add(name, "update", **given[name.partition("_")[0]], **options, experts=2)
        ranks.run(4)
    return ranks


def resumed(folder: Path, stage: int) -> dict[str, Any]:
    return {"folder": str(folder / f"checkpoint_{stage}"), "stage": stage, "experts": 2}


@pytest.mark.parametrize("name", [*STEPS, *(pytest.param(name, marks=pytest.mark.prove) for name in (*MORE, *FOUR))])
def test_a_step_is_that_of_one_rank(runs: Ranks, name: str) -> None:
    alone = "text_free" if name == "text_eager" else f"{name.partition('_')[0]}_alone"
    runs.assert_close(name, alone, 2e-6)
    for mine, other in zip(runs.json(name)["steps"], runs.json(alone)["steps"], strict=True):
        assert mine["policy/grad_norm"] > 0.5, "the gradient is clipped"
        for metric in ("loss", "entropy", "clip_fraction", "grad_norm"):
            assert mine[f"policy/{metric}"] == pytest.approx(other[f"policy/{metric}"], rel=1e-4, abs=1e-6), metric


def test_the_layouts_agree_and_passes_in_fp64_run(runs: Ranks) -> None:
    proof = runs.json("vl_3_proof")
    assert proof["rounding"] < 1e-5
    assert all(max(gaps) < 1e-5 for gaps in proof["layouts"].values())


def test_the_saved_model_is_whole(runs: Ranks) -> None:
    saved = AutoModelForCausalLM.from_pretrained(runs.folder / "saved").state_dict()
    sent = runs.tensors("text_2")
    for layer in (0, 1):
        names = [f"model.layers.{layer}.mlp.experts.{i}.down_proj.weight" for i in range(4)]
        whole = saved[f"model.layers.{layer}.mlp.experts.down_proj"].numpy()
        assert np.array_equal(whole, np.stack([sent[name] for name in names]))


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.prove) for stage in (1, 3))])
def test_a_continued_run_equals_an_unbroken_one_bit_for_bit(runs: Ranks, stage: int) -> None:
    for rank in (0, 1):
        unbroken, continued = runs.json(f"unbroken_{stage}.{rank}"), runs.json(f"continued_{stage}.{rank}")
        assert continued.pop("extra") == {"step": 2, "note": "é"}
        unbroken.pop("extra")
        assert continued == unbroken


def test_a_checkpoint_of_spread_experts_is_refused_without(runs: Ranks) -> None:
    kind, line = runs.json("unspread")
    assert kind == "ConfigError"
    assert "was written with ds.expert_parallel_size 2, this run has 1" in line


@pytest.mark.prove
def test_the_balancing_loss_and_the_average_are_those_of_ranks_with_all_experts(runs: Ranks) -> None:
    runs.assert_close("balanced", "balanced_whole", 2e-6)
    first, other = (runs.json(name)["steps"][0]["policy/aux_loss"] for name in ("balanced", "balanced_whole"))
    assert first == pytest.approx(other, rel=1e-5)
    runs.assert_close("mean", "mean_whole", 2e-6)
    one, two = (
        AutoModelForCausalLM.from_pretrained(runs.folder / name).state_dict() for name in ("mean_saved", "whole_saved")
    )
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 2e-6
    sent = runs.tensors("mean")
    assert float(np.abs(one["lm_head.weight"].numpy() - sent["lm_head.weight"]).max()) > 1e-4, "an average"


@pytest.mark.prove
def test_bf16_differs_by_rounding(runs: Ranks) -> None:
    runs.assert_close("bf16", "bf16_whole", 2e-2)
    first, other = (runs.json(name)["steps"][1]["policy/grad_norm"] for name in ("bf16", "bf16_whole"))
    assert first == pytest.approx(other, rel=2e-2)


@pytest.mark.prove
@pytest.mark.parametrize("stage", [2, 3])
def test_a_critic_spreads_its_experts_too(runs: Ranks, stage: int) -> None:
    runs.assert_close(f"value_{stage}", "value_alone", 2e-6)
    runs.assert_close(f"value_{stage}.values", "value_alone.values", 5e-6)
