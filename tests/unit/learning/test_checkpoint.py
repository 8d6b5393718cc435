"""Whether a checkpoint fits a run. What is in one, and that it continues bit for bit, test_learning*.py prove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import ConfigError
from vlmrl.learning.checkpoint import _check_identity

FULL: dict[str, Any] = {
    "model": {"a": [2, 3], "b": [3]},
    "trained": ["a", "b"],
    "base": None,
    "ranks": 2,
    "ds.zero_stage": 2,
    "ds.param_dtype": "fp32",
    "ds.load_in_4bit": False,
    "ds.lora.rank": 0,
    "actor.optim": "adam",
}
ADAPTED = FULL | {
    "model": {"a.lora_A": [4, 3], "a.lora_B": [2, 4]},
    "trained": ["lora"],
    "base": "ab12",
    "ds.lora.rank": 4,
    "ds.lora.alpha": 16.0,
    "ds.lora.use_rslora": False,
    "ds.lora.use_dora": False,
}


@pytest.mark.parametrize("identity", [FULL, ADAPTED])
def test_a_checkpoint_fits_the_run_that_wrote_it(identity: dict[str, Any]) -> None:
    _check_identity(dict(identity), identity, Path("c"))


def test_a_checkpoint_of_before_there_were_adapters_still_fits() -> None:
    old = {
        name: value
        for name, value in FULL.items()
        if name not in ("base", "ds.load_in_4bit", "ds.lora.rank", "actor.optim")
    }
    _check_identity(old, FULL, Path("c"))
    with pytest.raises(ConfigError, match=r"written with ds\.lora\.rank 0, this run has 4"):
        _check_identity(old, ADAPTED, Path("c"))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"ranks": 4}, "written with ranks 4, this run has 2"),
        ({"actor.optim": "muon"}, "written with actor.optim muon, this run has adam"),
        ({"ds.lora.use_dora": True}, "written with ds.lora.use_dora True, this run has False"),
        ({"base": "cd34"}, "adapter on other weights than those of actor.model_name_or_path"),
        ({"model": {"a.lora_A": [4, 3], "a.lora_B": [9, 4]}}, "another model: 1 tensors differ, such as a.lora_B"),
        ({"trained": ["other"]}, "trained other parts of the model"),
    ],
)
def test_what_differs_is_named_in_one_line(found: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        _check_identity(ADAPTED | found, ADAPTED, Path("c"))
    assert "\n" not in str(caught.value)
