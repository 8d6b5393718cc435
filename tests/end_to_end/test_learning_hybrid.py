"""Hybrid models under real DeepSpeed on CPU: ranks whose packs differ take the step of a single rank.

Linear attention runs once per batch of spans, so ranks call it different numbers of times in a pass: layers that ZeRO-3
gathered call by call would wait for each other forever.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from learning_rank import PACKED, PADDED, SHARED
from ranks import Ranks

MODELS = ("qwen3_5", "qwen3_5_text")
ADAPTERS: dict[str, dict[str, Any]] = {"lora": {"lora": {}}, "nf4": {"lora": {}, "four_bit": True}}
MANY = SHARED | {"max_tokens": 120}
FULL: dict[str, dict[str, Any]] = {
    "shared_3": {"cut": SHARED, "stage": 3},
    "packed_0": {"cut": PACKED, "stage": 0},
    "shared_2": {"cut": SHARED, "stage": 2},
    "many_2": {"cut": MANY, "stage": 2},
    "many_3": {"cut": MANY, "stage": 3},
    "padded_3": {"cut": PADDED, "stage": 3},
    "recomputed_3": {"cut": SHARED, "stage": 3, "gradient_checkpointing_enable": True},
}
"""Steps of two ranks."""
SHORT = {"qwen3_5_shared_3", "qwen3_5_lora_3"}
"""Jobs of two ranks that `make test` runs. All others are further combinations, of `make prove`."""
UPDATES = [f"{model}_{name}" for model in MODELS for name in FULL]
ADAPTATIONS = [f"{model}_{kind}_{stage}" for model in MODELS for kind in ADAPTERS for stage in (2, 3)]


def jobs(names: list[str]) -> list[Any]:
    """Return parameters of a test, a job each."""
    return [name if name in SHORT else pytest.param(name, marks=pytest.mark.prove) for name in names]


@pytest.fixture(scope="module")
def runs(proves: bool, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Results of all jobs: one rank, then two."""
    from vlmrl.models.tiny import build

    folder = tmp_path_factory.mktemp("runs")
    ranks = Ranks(folder, skipped=set() if proves else {*UPDATES, *ADAPTATIONS} - SHORT)
    arguments: dict[str, Any] = {}
    models = MODELS if proves else MODELS[:1]
    for name in models:
        model = str(build(name, folder / f"{name}_model", size="micro", seed=3))  # type: ignore[arg-type]
        arguments[name] = {"model": model, "old": str(folder / f"{name}.npz")}
        ranks.add(name, "score", model=model)
        ranks.add(f"{name}_alone", "update", **arguments[name], cut=PADDED)
        for kind, options in ADAPTERS.items():
            if proves or kind == "lora":
                ranks.add(f"{name}_{kind}", "adapt", **arguments[name], cut=PADDED, **options)
    ranks.run(1)
    for name in models:
        for case, options in FULL.items():
            ranks.add(f"{name}_{case}", "update", **arguments[name], **options)
        for kind, options in ADAPTERS.items():
            for stage in (2, 3):
                ranks.add(f"{name}_{kind}_{stage}", "adapt", **arguments[name], cut=SHARED, stage=stage, **options)
    ranks.run(2)
    return ranks


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_5_text", marks=pytest.mark.prove)])
def test_every_layout_and_the_reference_give_the_same_logprobs(runs: Ranks, name: str) -> None:
    result = runs.tensors(name)
    for i in range(10):
        for layout in ("shared", "packed"):
            np.testing.assert_allclose(result[f"{layout}.{i}"], result[f"padded.{i}"], atol=1e-5)
        assert np.array_equal(result[f"reference.{i}"], result[f"shared.{i}"])


@pytest.mark.parametrize("name", jobs(UPDATES))
def test_a_step_does_not_depend_on_ranks_packs_or_stage(runs: Ranks, name: str) -> None:
    alone = f"{'qwen3_5_text' if 'text' in name else 'qwen3_5'}_alone"
    mine, yardstick = (runs.json(job)["steps"] for job in (name, alone))
    for one, other in zip(mine, yardstick, strict=True):
        assert one["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-5)
        assert one["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=1e-4)
    runs.assert_close(name, alone, tolerance=1e-5)


@pytest.mark.parametrize("name", jobs(ADAPTATIONS))
def test_an_adapters_step_does_not_depend_on_ranks_packs_or_stage(runs: Ranks, name: str) -> None:
    alone = name.rpartition("_")[0]
    assert runs.json(name)["passes"][1]["policy/loss"] == pytest.approx(
        runs.json(alone)["passes"][1]["policy/loss"], abs=1e-5
    )
    one, two = runs.tensors(f"{name}.adapter"), runs.tensors(f"{alone}.adapter")
    assert one.keys() == two.keys()
    assert any("linear_attn.in_proj_qkv" in key for key in one)
    assert max(float(np.abs(one[key] - two[key]).max()) for key in one) < 1e-5
