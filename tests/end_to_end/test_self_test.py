"""`vlmrl doctor --self-test` on CPU: real collectives, DeepSpeed, Ray and vLLM, one line per check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vlmrl.commands.self_test.themes import THEMES


@pytest.mark.timeout(600)
def test_the_self_test_proves_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vlmrl", "doctor", "--self-test", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    (tmp_path / "report.jsonl").write_text(done.stdout)
    lines = {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert lines.keys() >= {check.name for theme in THEMES for check in theme.checks}, done.stderr
    assert [line for line in lines.values() if line["state"] == "failed"] == []
    assert done.returncode == 0
    if not torch.cuda.is_available():
        skipped = {name for name, line in lines.items() if line["state"] == "skipped"}
        assert skipped == {
            *("8-bit Adam", "Liger's layers", "weight sync within a GPU (ipc)", "sleep and wake"),
            *("weight sync between GPUs (nccl)", "engine in FP8", "engine in two stages"),
        }
        assert all(lines[name]["figure"] == "no NVIDIA device" for name in skipped)
    assert "digests and responses changed" in lines["weight sync through memory"]["figure"]
    assert "images change log-probs" in lines["two GRPO steps with images"]["figure"]
