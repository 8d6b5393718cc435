"""A reward model over real ranks gives the same scores whether it is replicated or sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learning_rank import PADDED, SHARED
from ranks import Ranks

KINDS = {"whole": {"stage": 0}, "offloaded": {"stage": 0, "offload": True}, "sharded": {"stage": 3}}
KINDS["sharded_offloaded"] = {"stage": 3, "offload": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Results of one launch with a single rank and one with two."""
    from vlmrl.models import tiny
    from vlmrl.models.value_head import save_value_model, value_net
    from vlmrl.plugins import processor

    folder = tmp_path_factory.mktemp("reward_model")
    base = str(tiny.build("qwen2_5_vl", folder / "base", size="micro", tied=True, seed=3))
    net = value_net(base, dtype=torch.float32, attn_implementation="sdpa", head_seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_value_model(net, processor(base, min_pixels=3136, max_pixels=100_000), folder / "scorer")
    ranks = Ranks(folder, Path(__file__).with_name("reward_rank.py"))
    scorer = {"reward_model": str(folder / "scorer"), "base": base}
    ranks.add("alone", "score", **scorer, cut=PADDED, stage=0)
    ranks.add("head_alone", "head", base=base, stage=0)
    ranks.run(1)
    for name, kind in KINDS.items():
        ranks.add(name, "score", **scorer, cut=SHARED, **kind)
    ranks.add("sharded_many", "score", **scorer, cut=PADDED, stage=3)
    ranks.add("head_sharded", "head", base=base, stage=3)
    ranks.run(2)
    return ranks


@pytest.mark.parametrize("kind", [*KINDS, "sharded_many"])
def test_scores_do_not_depend_on_ranks_shards_or_layout(runs: Ranks, kind: str) -> None:
    runs.assert_close(kind, "alone", 1e-5)
    scores = runs.tensors(kind)
    assert len(scores) == 20
    assert max(abs(float(scores[f"score.{i}"])) for i in range(10)) > 0.5


def test_no_rank_holds_the_weights_of_a_sharded_model_between_passes(runs: Ranks) -> None:
    (whole,) = runs.json("alone")
    assert runs.json("whole") == [whole] * 2
    assert max(runs.json("sharded")) < whole / 100


def test_a_new_head_is_the_same_on_a_model_that_is_sharded_while_it_is_read(runs: Ranks) -> None:
    runs.assert_close("head_sharded", "head_alone", 1e-12)
    assert max(runs.json("head_sharded")) < runs.json("head_alone")[0] / 100
