"""Ranks of a benchmark on this machine: this process is the first, and starts the others."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed

from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.system.scratch import MEETING_FILE

_Config = TypeVar("_Config")


@contextmanager
def other_ranks(size: int, measure: Callable[[_Config], object], config: _Config) -> Iterator[None]:
    """Run `measure(config)` on ranks 1 to `size - 1`; in the context, this process is rank 0.

    On CPU the ranks share the cores. Raises VlmrlError when another rank fails, ConfigError when there are GPUs, but
    fewer than ranks.
    """
    if size == 1:
        yield
        return
    if 0 < (num_gpus := torch.cuda.device_count()) < size:
        raise ConfigError(f"{size} ranks need {size} GPUs, and this machine has {num_gpus}")
    with TemporaryDirectory(prefix="vlmrl-bench-") as folder:
        variables = {"WORLD_SIZE": str(size), MEETING_FILE: str(Path(folder) / "store")}
        threads = max(1, torch.get_num_threads() // size)
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=_run, args=(rank, variables, threads, measure, config)) for rank in range(1, size)
        ]
        for rank in ranks:
            rank.start()
        _enter(0, variables, threads)
        try:
            yield
            torch.distributed.barrier()
            for rank in ranks:
                rank.join()
        finally:
            for rank in ranks:
                rank.kill()
    if failed := [number for number, rank in enumerate(ranks, start=1) if rank.exitcode]:
        raise VlmrlError(f"rank {failed[0]} of {size} failed: see its error above")


def _enter(rank: int, variables: dict[str, str], threads: int) -> None:
    os.environ.update(variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(threads)


def _run(rank: int, variables: dict[str, str], threads: int, measure: Callable[[Any], object], config: Any) -> None:
    from vlmrl import startup

    startup.prepare()
    _enter(rank, variables, threads)
    measure(config)
    # Without shutting the interpreter down, during which a rank may abort once the others have ended.
    torch.distributed.barrier()
    os._exit(0)
