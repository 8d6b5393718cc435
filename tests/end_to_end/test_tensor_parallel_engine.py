"""An engine of two tensor-parallel workers: its log-probs equal the trainer's, and stale shards are detected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_pair import EXACT, Pair, PlantableEngine, Trainer, rollout_engine

from vlmrl.errors import SyncError
from vlmrl.models import tiny


def test_a_shard_that_kept_its_weights_is_found_in_its_worker(tmp_path: Path) -> None:
    model = tiny.build("qwen2_5_vl", tmp_path / "model", tied=True, size="micro")
    with asyncio.Runner() as runner:
        engine = rollout_engine(model, kind=PlantableEngine, tensor_parallel_size=2)
        pair = Pair(engine, Trainer(model), runner)
        pair.run(engine.start())
        try:
            for _ in range(2):
                pair.trainer.change("everything")
                pair.sync()
            assert pair.difference() < EXACT
            reports = pair.run(engine.readback())
            assert [(report["wrong"], report["unread"]) for report in reports] == [([], [])] * 2
            pair.trainer.change("everything")
            pair.plant("KeepsAShard")
            message = r"layers of worker 1, \S+layers\.0\.self_attn\.o_proj\.weight holds the weights from before$"
            with pytest.raises(SyncError, match=message):
                pair.sync()
            pair.plant("Sound")
            pair.sync()
            assert pair.difference() < EXACT
        finally:
            pair.run(engine.shutdown())
