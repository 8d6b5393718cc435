"""The quick scripts of tests/benchmarks at a small size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.prove


@pytest.mark.parametrize(
    ("script", "flags", "printed"),
    [
        ("advantages.py", "--responses 16 --tokens 64 --repeats 1 --most 60", "group_norm"),
        ("divergence_memory.py", "--tokens 32 --hidden 32", "largest_differences"),
    ],
)
def test_a_script_runs(script: str, flags: str, printed: str) -> None:
    words = [sys.executable, str(SCRIPTS / script), *flags.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
