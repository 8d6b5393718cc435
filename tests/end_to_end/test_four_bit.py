"""A base in 4 bits under real DeepSpeed on two ranks: not one bit changes, and there is one copy of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANK = Path(__file__).with_name("four_bit_rank.py")
KINDS = {f"{dtype}_{stage}": {"stage": stage, "dtype": dtype} for dtype in ("fp32", "bf16") for stage in (0, 1, 2, 3)}
CAST = {"stage": 2, "dtype": "bf16", "storage": "fp32"}
"""What the settings refuse."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the first of two ranks saw, by kind."""
    from vlmrl.models.tiny import build

    folder = tmp_path_factory.mktemp("four_bit")
    model, out = build("qwen3", folder / "model", size="micro", seed=3), folder / "found.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(out), str(model), json.dumps(KINDS | {"cast": CAST})],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts[0][-3000:]
    results: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes_when_deepspeed_starts_and_adapters_train(found: dict[str, Any], kind: str) -> None:
    # Two layers of seven matrices.
    assert found[kind]["bits"] == 14
    assert found[kind]["changed"] == 0
    assert found[kind]["base"] == 0.0


def test_bits_stored_as_floats_of_another_dtype_would_change_and_be_seen(found: dict[str, Any]) -> None:
    assert found["cast"]["changed"] == 14


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_base_and_what_the_adapter_adds_rounded_once(found: dict[str, Any], kind: str) -> None:
    # Weights reach 0.5 or so, where neighbours in bf16 are 2 ** -9 apart.
    assert found[kind]["merged"] <= (0.0 if kind.startswith("fp32") else 2**-9)


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_one_copy_of_the_base(found: dict[str, Any], kind: str) -> None:
    # Of an adapter's numbers, in fp32: themselves or a master, gradients, two moments. A copy would weigh twice that.
    of_adapters = 4 * 4 * found[kind]["trainable"]
    assert of_adapters < found[kind]["base_bytes"] / 2
    assert found[kind]["held"] < found[kind]["base_bytes"] + of_adapters
