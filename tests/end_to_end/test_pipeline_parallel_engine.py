"""An engine of two pipeline stages: its log-probs equal the trainer's after syncs, and a stale layer is detected."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_pair import EXACT, two_workers

from vlmrl.errors import SyncError
from vlmrl.models import tiny


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.prove)])
def test_an_engine_of_two_stages_equals_the_trainer(tmp_path: Path, tied: bool) -> None:
    model = tiny.build("qwen2_5_vl", tmp_path / "model", tied=tied, size="micro")
    with two_workers(model, pipeline_parallel_size=2) as pair:
        for group in pair.generate(pair.trainer.prompts()):
            for segment, scores in zip(group.segments, pair.run(pair.engine.score(group)), strict=True):
                assert abs(scores - pair.trainer.plain_logprobs(segment)).max() < EXACT
        reports = pair.run(pair.engine.readback())
        assert sum(report["layers"] for report in reports) > max(report["layers"] for report in reports)
        pair.trainer.change("everything")
        pair.plant("Scales")
        with pytest.raises(
            SyncError, match=r"layers of worker 1, \S+layers\.1\.mlp\.down_proj\.weight is scaled by 1\.01"
        ):
            pair.sync()
        pair.plant("Sound")
        with pytest.raises(SyncError, match=r"no weights arrived for \S+layers\.1\.mlp\.down_proj"):
            pair.sync(skip="layers.1.mlp.down_proj.weight")
        pair.sync()
        assert pair.difference() < EXACT


@pytest.mark.prove
@pytest.mark.parametrize("division", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_experts_over_two_workers_equal_the_trainers(tmp_path: Path, family: tiny.Family, division: str) -> None:
    with two_workers(tiny.build(family, tmp_path / "model", size="micro"), **{division: 2}):
        pass
