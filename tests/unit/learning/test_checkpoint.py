"""Whether a checkpoint fits a run, and full disks. Contents and resuming bit for bit: end_to_end/test_learning*.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_disk import small_disk, turn_read_only

from vlmrl.errors import ConfigError, StorageError
from vlmrl.learning.checkpoint import _check_identity, _write_whole
from vlmrl.learning.checkpoint_checksums import find_damage, write_checksums
from vlmrl.learning.deepspeed_engine import init_distributed
from vlmrl.system.atomic_folders import checkpoints

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


def test_a_checkpoint_from_before_adapters_still_fits() -> None:
    old = {
        name: value
        for name, value in FULL.items()
        if name not in ("base", "ds.load_in_4bit", "ds.lora.rank", "actor.optim")
    }
    _check_identity(old, FULL, Path("c"))
    with pytest.raises(ConfigError, match=r"written with ds\.lora\.rank 0, this run has 4"):
        _check_identity(old, ADAPTED, Path("c"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ranks": 4}, "written with ranks 4, this run has 2"),
        ({"actor.optim": "muon"}, "written with actor.optim muon, this run has adam"),
        ({"ds.lora.use_dora": True}, "written with ds.lora.use_dora True, this run has False"),
        ({"base": "cd34"}, "adapter on other weights than those of actor.model_name_or_path"),
        ({"model": {"a.lora_A": [4, 3], "a.lora_B": [9, 4]}}, "another model: 1 tensors differ, such as a.lora_B"),
        ({"trained": ["other"]}, "trained other parts of the model"),
    ],
)
def test_a_difference_is_named_in_one_line(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        _check_identity(ADAPTED | changed, ADAPTED, Path("c"))
    assert "\n" not in str(caught.value)


def write_checkpoint(disk: Path, step: int, *, mib: int) -> Path:
    """Write a checkpoint of this many MiB with a single rank."""

    def write(path: Path) -> None:
        (path / "deepspeed").mkdir()
        for number in range(mib):
            torch.save(torch.zeros(2**18), path / "deepspeed" / f"{number}.pt")
        write_checksums(path, rank=0, num_ranks=1)

    folder = disk / f"step_{step:06d}"
    _write_whole(folder, write)
    return folder


def is_complete(folder: Path) -> bool:
    return find_damage(folder, rank=0, num_ranks=1) == []


def test_a_full_disk_leaves_the_last_checkpoint_complete_and_no_partial_one(tmp_path: Path) -> None:
    init_distributed(timeout_s=60)
    with small_disk(tmp_path / "disk", mib=8) as disk:
        complete = write_checkpoint(disk, 1, mib=3)
        with pytest.raises(StorageError) as caught:
            write_checkpoint(disk, 2, mib=6)
        line = f"step_000002 cannot be written to {disk}: No space left on device ("
        assert str(caught.value).startswith(line)
        assert list(disk.iterdir()) == [complete]
        assert is_complete(complete)
        assert len(list((complete / "deepspeed").iterdir())) == 3
        # A failed overwrite keeps the older checkpoint of the step.
        with pytest.raises(StorageError):
            write_checkpoint(disk, 1, mib=6)
        assert checkpoints(disk) == [complete]
        assert is_complete(complete)
        assert is_complete(write_checkpoint(disk, 2, mib=3)), "a smaller checkpoint fits"


def test_a_disk_that_turns_read_only_leaves_the_last_checkpoint_complete(tmp_path: Path) -> None:
    init_distributed(timeout_s=60)
    with small_disk(tmp_path / "disk", mib=8) as disk:
        complete = write_checkpoint(disk, 1, mib=1)
        turn_read_only(disk)
        with pytest.raises(StorageError, match=r"step_000002 cannot be written to .*: Read-only file system"):
            write_checkpoint(disk, 2, mib=1)
        assert checkpoints(disk) == [complete]
        assert is_complete(complete)
