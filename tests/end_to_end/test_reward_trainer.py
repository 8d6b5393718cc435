"""A reward model learns the same from its data however they are packed and divided among ranks, and the folder that it
writes gives the scores that it had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Ranks
from reward_trainer_rank import CUTS, MARGINS

KINDS = {
    "whole": {"stage": 0, "cut": "shared_one"},
    "whole_3": {"stage": 3, "cut": "packed_many", "again": True},
    "lora_2": {"stage": 2, "cut": "shared_one", "lora": {}},
    "nf4_3": {"stage": 3, "cut": "shared_one", "lora": {}, "four_bit": True},
}
ON_ONE_RANK = ("whole",)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Results of one launch with a single rank and one with two."""
    from vlmrl.models.tiny import build

    folder = tmp_path_factory.mktemp("reward_trainer")
    models = {
        family: str(build(family, folder / family, size="micro", tied=False, seed=3))  # type: ignore[arg-type]
        for family in ("qwen2_5_vl", "qwen3")
    }
    ranks = Ranks(folder, Path(__file__).with_name("reward_trainer_rank.py"))

    def add(names: list[str]) -> None:
        for name in names:
            ranks.add(name, "train", model=models["qwen2_5_vl"], save=str(folder / f"saved_{name}"), **KINDS[name])

    for family, model in models.items():
        ranks.add(f"{family}_1", "gradients", model=model)
    add([name for name in KINDS if name in ON_ONE_RANK])
    ranks.run(1)
    for family, model in models.items():
        ranks.add(f"{family}_2", "gradients", model=model)
    add([name for name in KINDS if name not in ON_ONE_RANK])
    ranks.add("text", "train", model=models["qwen3"], save=str(folder / "saved_text"), cut="packed_one")
    ranks.run(2)
    return ranks


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
@pytest.mark.parametrize("loss", ["pairs", "steps"])
def test_loss_and_gradient_do_not_depend_on_ranks_micro_batches_or_layout(runs: Ranks, family: str, loss: str) -> None:
    alone, pair = runs.tensors(f"{family}_1"), runs.tensors(f"{family}_2")
    yardstick = alone[f"{loss}.padded_one"]
    scale = float(np.abs(yardstick[1:]).max())
    assert scale > 1e-3
    for cut in CUTS:
        for result in (alone, pair):
            assert result[f"{loss}.{cut}"][0] == pytest.approx(yardstick[0], abs=1e-6)
            np.testing.assert_allclose(result[f"{loss}.{cut}"][1:], yardstick[1:], atol=1e-5 * scale)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_the_loss_is_that_of_the_scores(runs: Ranks, family: str) -> None:
    result = runs.tensors(f"{family}_1")
    for cut in CUTS:
        scores = np.array([result[f"score.{i}.{cut}"] for i in range(10)])
        difference = scores[0::2] - scores[1::2] - np.array(MARGINS)
        assert result[f"pairs.{cut}"][0] == pytest.approx(np.log1p(np.exp(-difference)).mean(), abs=1e-6)


@pytest.mark.parametrize("name", [*KINDS, "text"])
def test_the_saved_folder_gives_the_scores_that_the_model_had(runs: Ranks, name: str) -> None:
    result = runs.tensors(name)
    own, read = (np.array([result[f"{kind}.{i}"] for i in range(10)]) for kind in ("own", "read"))
    assert np.ptp(own) > 0.01
    np.testing.assert_allclose(read, own, atol=2e-6)


def test_ranks_and_shards_take_the_same_steps(runs: Ranks) -> None:
    result, alone = runs.tensors("whole_3"), runs.tensors("whole")
    for i in range(10):
        assert result[f"own.{i}"] == pytest.approx(float(alone[f"own.{i}"]), abs=1e-5)
    for one, other in zip(runs.json("whole"), runs.json("whole_3"), strict=True):
        assert one.keys() == other.keys() >= {"rm/loss", "rm/accuracy", "rm/difference", "rm/score", "rm/grad_norm"}
        for metric in ("rm/loss", "rm/accuracy", "rm/difference", "rm/score", "rm/grad_norm"):
            assert one[metric] == pytest.approx(other[metric], abs=1e-5), metric


def test_a_text_model_is_a_sequence_classifier_of_transformers(runs: Ranks) -> None:
    from transformers import AutoModelForSequenceClassification

    net = AutoModelForSequenceClassification.from_pretrained(runs.folder / "saved_text", dtype=torch.float32).eval()
    assert (net.config.mean, net.config.std, net.config.num_labels) == (0.5, 2.0, 1)
    from learning_rank import samples

    from vlmrl.plugins import processor

    reader = processor(str(runs.folder / "saved_text"), min_pixels=3136, max_pixels=100_000)
    rows = samples(reader)[:4]
    width = max(len(row.tokens) for row in rows)
    ids = np.stack(
        [np.pad(row.tokens, (0, width - len(row.tokens)), constant_values=reader.pad_token_id) for row in rows]
    )
    with torch.no_grad():
        logits = net(input_ids=torch.from_numpy(ids)).logits[:, 0]
    expected = [float(runs.tensors("text")[f"own.{i}"]) for i in range(4)]
    assert logits.tolist() == pytest.approx(expected, abs=2e-6)
