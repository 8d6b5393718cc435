"""An engine of two tensor-parallel workers: its log-probs equal the trainer's, and stale shards are detected."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_pair import EXACT, two_workers

from vlmrl.errors import SyncError
from vlmrl.models import tiny


def test_a_shard_that_kept_its_weights_is_found_in_its_worker(tmp_path: Path) -> None:
    model = tiny.build("qwen2_5_vl", tmp_path / "model", tied=True, size="micro")
    with two_workers(model, tensor_parallel_size=2) as pair:
        pair.trainer.change("everything")
        pair.plant("KeepsAShard")
        message = r"layers of worker 1, \S+layers\.0\.self_attn\.o_proj\.weight holds the weights from before$"
        with pytest.raises(SyncError, match=message):
            pair.sync()
        pair.plant("Sound")
        pair.sync()
        assert pair.difference() < EXACT
