"""Damage of a checkpoint's files is found by exactly one rank, however many ranks wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from vlmrl.learning.checkpoint_checksums import find_damage, has_checksums, write_checksums

OPTIMIZER = "deepspeed/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
FILES = {
    "deepspeed/mp_rank_00_model_states.pt": 0,
    "deepspeed/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": 0,
    OPTIMIZER: 1,
    "random_rank_0.pt": 0,
    "random_rank_1.pt": 1,
    "average_rank_1.pt": 1,
    "identity.json": 0,
    "extra.json": 0,
    "latest": 0,
}
"""File -> the rank that writes it."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step_000003"
    (folder / "deepspeed").mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(name.encode() * 100)
    # Rank 0 may be done before rank 1 begins.
    for rank in (0, 1):
        write_checksums(folder, rank=rank, num_ranks=2)
    return folder


def damage_by_rank(folder: Path, num_ranks: int = 2) -> list[list[str]]:
    return [find_damage(folder, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def test_each_rank_lists_the_files_that_it_wrote(checkpoint: Path) -> None:
    for rank in (0, 1):
        lines = (checkpoint / f"checksums_rank_{rank}.xxh128").read_text().splitlines()
        listed = dict(line.split("  ")[::-1] for line in lines)
        assert set(listed) == {name for name, owner in FILES.items() if owner == rank}
        for name, digest in listed.items():
            assert digest == xxhash.xxh3_128_hexdigest((checkpoint / name).read_bytes())
    assert has_checksums(checkpoint)
    assert damage_by_rank(checkpoint) == [[], []]


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_bit, "its checksum differs"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "its checksum differs"),
        (lambda file: file.write_bytes(b""), "its checksum differs"),
        (Path.unlink, "it is missing"),
        (lambda file: (file.unlink(), file.mkdir()), "it cannot be read: Is a directory"),
    ],
)
def test_a_damaged_file_is_named_by_the_rank_that_wrote_it(
    checkpoint: Path, damage: Callable[[Path], object], reason: str
) -> None:
    damage(checkpoint / OPTIMIZER)
    assert damage_by_rank(checkpoint) == [[], [f"{OPTIMIZER}: {reason}"]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_any_number_of_ranks_finds_each_damaged_file_once(checkpoint: Path, num_ranks: int) -> None:
    for name in FILES:
        flip_bit(checkpoint / name)
    lines = [line for of_rank in damage_by_rank(checkpoint, num_ranks) for line in of_rank]
    assert sorted(lines) == sorted(f"{name}: its checksum differs" for name in FILES)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Path.unlink, "it is missing"),
        (lambda file: file.write_bytes(b""), "it is empty"),
        (lambda file: file.write_bytes(bytes(10)), "it is not a list of checksums"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "it cannot be read"),
    ],
)
def test_a_damaged_list_is_reported(checkpoint: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(checkpoint / "checksums_rank_1.xxh128")
    assert damage_by_rank(checkpoint) == [[], [f"checksums_rank_1.xxh128: {reason}"]]


def test_a_checkpoint_from_before_checksums_passes(checkpoint: Path) -> None:
    for rank in (0, 1):
        (checkpoint / f"checksums_rank_{rank}.xxh128").unlink()
    assert not has_checksums(checkpoint)
    flip_bit(checkpoint / OPTIMIZER)
    assert damage_by_rank(checkpoint) == [[], []]
    (checkpoint / "extra.json").unlink()
    assert damage_by_rank(checkpoint) == [["extra.json: it is missing"], []]


def test_a_rank_all_of_whose_files_are_missing_is_noticed(checkpoint: Path) -> None:
    (checkpoint / "identity.json").write_text('{"ranks": 2}')
    for rank in (0, 1):
        write_checksums(checkpoint, rank=rank, num_ranks=2)
    assert damage_by_rank(checkpoint) == [[], []]
    for file in list(checkpoint.rglob("*rank_1*")):
        file.unlink()
    assert damage_by_rank(checkpoint) == [[], ["checksums_rank_1.xxh128: it is missing"]]
