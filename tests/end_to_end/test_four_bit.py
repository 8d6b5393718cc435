"""A 4-bit base under real DeepSpeed on two ranks: no bit changes, and there is a single copy of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ranks import python

RANK = Path(__file__).with_name("four_bit_rank.py")
KINDS = {f"{dtype}_{stage}": {"stage": stage, "dtype": dtype} for dtype in ("fp32", "bf16") for stage in (0, 1, 2, 3)}
CAST = {"stage": 2, "dtype": "bf16", "storage": "fp32"}
"""A combination that the settings reject."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of the first of two ranks, by kind."""
    from vlmrl.models.tiny import build

    folder = tmp_path_factory.mktemp("four_bit")
    model, out = build("qwen3", folder / "model", size="micro", seed=3), folder / "results.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [python(), str(RANK), str(out), str(model), json.dumps(KINDS | {"cast": CAST})],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts[0][-3000:]
    by_kind: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return by_kind


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes_when_deepspeed_starts_and_adapters_train(results: dict[str, Any], kind: str) -> None:
    # Two layers of seven matrices.
    assert results[kind]["bits"] == 14
    assert results[kind]["changed"] == 0
    assert results[kind]["base"] == 0.0


def test_bits_stored_as_floats_of_another_dtype_would_change_and_be_seen(results: dict[str, Any]) -> None:
    assert results["cast"]["changed"] == 14


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_base_and_what_the_adapter_adds_rounded_once(results: dict[str, Any], kind: str) -> None:
    # Weights reach about 0.5, where adjacent bf16 numbers are 2 ** -9 apart.
    assert results[kind]["merged"] <= (0.0 if kind.startswith("fp32") else 2**-9)


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_one_copy_of_the_base(results: dict[str, Any], kind: str) -> None:
    # Per adapter parameter in fp32: weight or master weight, gradient, two moments. A copy would double that.
    of_adapters = 4 * 4 * results[kind]["trainable"]
    assert of_adapters < results[kind]["base_bytes"] / 2
    assert results[kind]["held"] < results[kind]["base_bytes"] + of_adapters
