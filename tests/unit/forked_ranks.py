"""Run a function on several ranks, which are forked from the test's process and connected by gloo."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

_TIMEOUT_S = 60


def on_ranks(size: int, work: Callable[[], Any], folder: Path) -> list[Any]:
    """Return the results of `work` on ranks 0 to `size - 1`; `folder` is an empty one for files. Fails if one fails."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(number, size, work, folder)) for number in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(2 * _TIMEOUT_S)
    errors = [path.read_text() for path in sorted(folder.glob("error.*"))]
    assert not errors, errors[0]
    assert [rank.exitcode for rank in ranks] == [0] * size
    return [torch.load(folder / f"result.{number}", weights_only=False) for number in range(size)]


def _rank(number: int, size: int, work: Callable[[], Any], folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(folder / "store"), size),
        rank=number,
        world_size=size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        torch.save(work(), folder / f"result.{number}")
        torch.distributed.barrier()
    except BaseException:  # the test's process prints it
        (folder / f"error.{number}").write_text(traceback.format_exc())
        raise
