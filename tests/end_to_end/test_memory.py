"""The memory plan of a trainer rank equals the measured memory within 20 %."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlmrl.models import tiny

SCRIPT = Path(__file__).with_name("memory_rank.py")
LORA = {"lora": {"rank": 8}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tiny.Family], Path]:
    """`model(family)`: about 75M numbers, so that weights and activations outweigh what the plan leaves out."""

    def make(family: tiny.Family) -> Path:
        out = Path(tmp_path_factory.getbasetemp()) / f"medium_{family}"
        return out if out.exists() else tiny.build(family, out, size="medium")

    return make


CASE: tuple[tiny.Family, dict[str, Any]] = ("qwen2_5_vl", {"ds": {"zero_stage": 2, **LORA, "load_in_4bit": True}})
MORE_CASES: list[tuple[tiny.Family, dict[str, Any]]] = [
    ("qwen3", {"ds": {"zero_stage": 0}}),
    ("qwen3", {"ds": {"zero_stage": 2}}),
    ("qwen3", {"ds": {"zero_stage": 2, **LORA}}),
    ("qwen3", {"ds": {"zero_stage": 2, **LORA}, "checkpointing": True}),
    ("qwen3", {"ds": {"zero_stage": 2, **LORA, "load_in_4bit": True}}),
    ("qwen2_5_vl", {"ds": {"zero_stage": 2}}),
    ("qwen2_5_vl", {"ds": {"zero_stage": 2}, "role": "critic"}),
    ("qwen2_5_vl", {"ds": {"zero_stage": 2}, "role": "both"}),
]


@pytest.mark.parametrize(
    ("family", "case"), [CASE, *(pytest.param(*case, marks=pytest.mark.prove) for case in MORE_CASES)]
)
def test_a_rank_holds_what_the_plan_says(
    family: tiny.Family, case: dict[str, Any], model: Callable[[tiny.Family], Path]
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(model(family)), json.dumps(case)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    if result["measured"] is None:
        pytest.skip("this kernel does not tell the peak of a process")
    assert result["estimated"] / result["measured"] == pytest.approx(1.0, abs=0.2), result
