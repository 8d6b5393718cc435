"""Run a function on several ranks, which are forked from the test's process and connected by gloo."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d

_TIMEOUT_S = 30


def on_ranks(size: int, work: Callable[[], Any], folder: Path) -> list[Any]:
    """Return the results of `work` on ranks 0 to `size - 1`; `folder` is an empty one for files. Fails if one fails."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(number, size, work, folder)) for number in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(_TIMEOUT_S)
        rank.kill()
        rank.join()
    errors = [path.read_text() for path in sorted(folder.glob("error.*"))]
    assert not errors, errors[0]
    assert [rank.exitcode for rank in ranks] == [0] * size
    return [torch.load(folder / f"result.{number}", weights_only=False) for number in range(size)]


def _rank(number: int, size: int, work: Callable[[], Any], folder: Path) -> None:
    try:
        torch.set_num_threads(1)  # threads were not forked
        _earlier = _forget_groups()  # kept until this process ends: its end would wait for its threads
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(str(folder / "store"), size),
            rank=number,
            world_size=size,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        torch.save(work(), folder / f"result.{number}")
        torch.distributed.barrier()
    except BaseException:  # the test's process prints it
        (folder / f"error.{number}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _forget_groups() -> Any:
    """Forget the process group of an earlier test, whose threads were not forked, and return it."""
    if not torch.distributed.is_initialized():
        return None
    world = distributed_c10d._world
    group = world.default_pg
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.clear()
    world.tags_to_pg.clear()
    world.group_count = 0
    distributed_c10d._update_default_pg(None)
    torch._C._distributed_c10d._unregister_all_process_groups()
    return group
