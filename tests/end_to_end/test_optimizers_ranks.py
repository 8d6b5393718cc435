"""Muon and the moving average under real DeepSpeed on two ranks: every ZeRO stage matches a single rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import python
from safetensors.torch import load_file

RANK = Path(__file__).with_name("optimizers_rank.py")
KINDS = [(dtype, stage) for dtype in ("fp32", "bf16") for stage in (0, 1, 2, 3) if (dtype, stage) != ("bf16", 0)]
"""bf16 needs at least stage 1."""
IDS = [f"{dtype}_{stage}" for dtype, stage in KINDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of one rank and of two."""
    from vlmrl.models.tiny import build

    folder = tmp_path_factory.mktemp("optimizers")
    model = str(build("qwen3", folder / "model", size="micro", seed=3, tied=False))
    alone, together = [], []
    for dtype, stage in KINDS:
        options = {"model": model, "dtype": dtype, "stage": stage}
        together += [[str(folder / f"{what}_{dtype}_{stage}"), what, options] for what in ("muon", "resume", "average")]
    alone.append([str(folder / "alone"), "muon", {"model": model, "dtype": "fp32", "stage": 0}])
    _run(folder / "alone.json", alone, count=1)
    _run(folder / "together.json", together, count=2)
    return folder


def _run(job: Path, tasks: list[Any], *, count: int) -> None:
    job.write_text(json.dumps(tasks))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [python(), str(RANK), str(job)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count, texts[0][-3000:]


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return result


def _apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference between two models, by tensor."""
    assert one.keys() == two.keys()
    return {name: float((one[name] - two[name]).abs().max()) for name in one}


def test_muon_moves_what_it_should_and_nothing_that_is_frozen(folder: Path) -> None:
    moved = _apart(_weights(folder / "alone"), load_file(folder / "model" / "model.safetensors"))
    # Three orthogonalized steps of 0.05 in 64 dimensions: a weight moves by a sizeable part of that.
    assert min(moved[name] for name in _json(folder / "alone" / "moved.json")) > 0.03
    assert [name for name, by in moved.items() if by == 0.0] == ["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_takes_the_steps_of_one_rank_in_every_stage(folder: Path, stage: int) -> None:
    # Muon's iterations run in fp16, so that the last bit of a gradient affects the third digit of a step.
    assert max(_apart(_weights(folder / f"muon_fp32_{stage}"), _weights(folder / "alone")).values()) < 0.004


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_takes_the_same_steps_in_bf16_to_its_precision(folder: Path, stage: int) -> None:
    assert max(_apart(_weights(folder / f"muon_bf16_{stage}"), _weights(folder / "alone")).values()) < 0.02


@pytest.mark.parametrize(("dtype", "stage"), KINDS, ids=IDS)
def test_muon_moves_the_same_matrices_in_every_stage(folder: Path, dtype: str, stage: int) -> None:
    moved = _json(folder / f"muon_{dtype}_{stage}" / "moved.json")
    # Two layers of seven, one of which is frozen.
    assert len(moved) == 13
    assert moved == _json(folder / "alone" / "moved.json")


@pytest.mark.parametrize(("dtype", "stage"), KINDS, ids=IDS)
def test_a_run_with_muon_goes_on_from_a_checkpoint_to_the_last_bit(folder: Path, dtype: str, stage: int) -> None:
    assert _json(folder / f"resume_{dtype}_{stage}" / "result.json")["worst"] == 0.0


@pytest.mark.parametrize(("dtype", "stage"), KINDS, ids=IDS)
def test_a_checkpoint_in_which_somebody_planted_code_is_refused_and_the_code_does_not_run(
    folder: Path, dtype: str, stage: int
) -> None:
    result = _json(folder / f"resume_{dtype}_{stage}" / "result.json")
    model, optimizer = result["refused"]
    assert "holds a Python object that no checkpoint of vlmrl has" in model
    assert optimizer is None if stage == 0 else "holds a Python object" in optimizer
    assert not result["ran"]


@pytest.mark.parametrize(("dtype", "stage"), KINDS, ids=IDS)
def test_the_average_is_of_all_that_trains_and_the_swap_leaves_no_trace(folder: Path, dtype: str, stage: int) -> None:
    result = _json(folder / f"average_{dtype}_{stage}" / "result.json")
    assert result["moved"] > 0.01
    assert result["apart"] > 0.001
    # The largest weights, those of the norms, are close to 1, above which adjacent bf16 numbers are 2 ** -7 apart.
    assert result["error"] <= (1e-6 if dtype == "fp32" else 2**-8)
    assert result["frozen"] == result["left"] == result["resumed"] == 0.0
    assert result["dtypes"] == ["torch.float32"]
    # One copy over both ranks; shards of an odd size are padded.
    assert result["trained"] <= result["held"] <= result["trained"] + (64 if stage == 3 else 0)
    assert "written without a moving average" in result["refused"]["lost"]
    assert "does not fit this run" in result["refused"]["other"]
    assert not any("\n" in message for message in result["refused"].values())
