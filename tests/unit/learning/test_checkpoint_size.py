"""Minimum size of a checkpoint. That real ones are not smaller: end_to_end/test_resume.py."""

from __future__ import annotations

from typing import Any

import pytest

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.config.lora import Lora
from vlmrl.learning.checkpoint_size import min_checkpoint_bytes

TABLE = [("vision", 0, 10), ("language", 60, 90)]


@pytest.mark.parametrize(
    ("optim", "ds", "wanted"),
    [
        ("adam", {"zero_stage": 0, "param_dtype": "fp32"}, 100 * 4 + 60 * 8),
        ("adam", {"zero_stage": 0, "param_dtype": "bf16"}, 100 * 2 + 60 * 12),
        ("adam", {"zero_stage": 2, "param_dtype": "fp32"}, 100 * 4 + 60 * 12),
        ("adam", {"zero_stage": 3, "param_dtype": "bf16"}, 60 * 12),
        ("adam_8bit", {"zero_stage": 2, "param_dtype": "bf16"}, 100 * 2 + 60 * 6),
        ("muon", {"zero_stage": 2, "param_dtype": "bf16"}, 100 * 2 + 60 * 8),
        ("adam", {"zero_stage": 2, "param_dtype": "bf16", "lora": Lora(rank=4)}, 60 * 2 + 60 * 12),
    ],
)
def test_weights_copy_and_moments(optim: str, ds: dict[str, Any], wanted: int) -> None:
    model = Model.model_validate({"model_name_or_path": "m", "optim": optim})
    assert min_checkpoint_bytes(model, Ds.model_validate(ds), TABLE) == wanted
