"""Pools of scoring processes: start, end, and the outcome of a call.

The processes run `function_worker.py`. `functions.py` sets the time limit of a call, and pebble kills a process that
exceeds it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from vlmrl.rewards import function_worker
from vlmrl.rewards.failures import TooHardError
from vlmrl.types import Retry

START_LIMIT_S = 120.0
"""Time limit for importing the user's file, including what it loads."""
PATIENCE_S = 30.0
"""Time beyond all limits for killing a process that ignores signals and starting the next, before a pool counts as
stuck."""
_MAX_TMPDIR_CHARS = 75
"""Characters. A socket's path has at most 107, and the fork server's adds 32 to the temporary folder."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Trouble:
    """A call that ran too long or whose process died. A second try may succeed."""

    kind: Retry
    problem: str
    """One line."""


def start_pool(
    names: tuple[str, ...],
    spec: str | None,
    *,
    num_workers: int,
    max_tasks: int = 0,
    pass_env: tuple[str, ...] = (),
    log: Path | None = None,
) -> ProcessPool:
    """Make a pool of processes with the built-in functions `names` and the user's function `spec`.

    Functions see those secrets of the environment that `pass_env` names, and print to `log`. With `max_tasks`, each
    process ends after that many calls.
    """
    _make_folder_of_sockets()
    # Forking this process would copy locks that its threads hold (Ray, gRPC, vLLM). The fork server is a clean
    # process with math-verify already imported, so that a worker that had to be killed is replaced in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vlmrl.rewards.function_worker", *(f"vlmrl.rewards.{name}" for name in names)])
    with _without_working_directory():
        multiprocessing.forkserver.ensure_running()
    return ProcessPool(
        max_workers=num_workers,
        max_tasks=max_tasks,
        context=context,
        initializer=function_worker.start,
        initargs=(names, spec, os.getpid(), pass_env, log),
    )


@contextmanager
def _without_working_directory() -> Iterator[None]:
    """Keep the user's modules in the working directory (`random.py`) from Python processes that are started meanwhile:
    they import libraries. Scoring processes have the module path of this process anyway."""
    safe = "PYTHONSAFEPATH"
    if os.environ.get(safe):
        yield
        return
    os.environ[safe] = function_worker.SAFE_PATH
    try:
        yield
    finally:
        del os.environ[safe]


def _make_folder_of_sockets() -> None:
    """Put the fork server's socket below /tmp if the path of the temporary folder is too long for one."""
    default = tempfile.gettempdir()
    if len(os.fsencode(default)) > _MAX_TMPDIR_CHARS and os.access("/tmp", os.W_OK):
        tempfile.tempdir = "/tmp"
        try:
            util.get_temp_dir()  # it keeps the folder, for this process and for those that it starts
        finally:
            tempfile.tempdir = default


def end_pool(pool: ProcessPool) -> None:
    """End the pool's processes, even if they are busy."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


def outcome(
    future: asyncio.Future[Result] | ProcessFuture[Result], function: str, time_limit_s: float
) -> Result | Trouble | None:
    """Return the call's value, or why there is none; None if its pool broke before the call was made."""
    if not future.done() or future.cancelled():
        return None
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, TimeoutError):
        return Trouble("timeout", f"{function} took longer than reward.time_limit_s {time_limit_s:g}")
    if isinstance(error, TooHardError):
        return Trouble("timeout", f"{function}: {error}")
    if isinstance(error, ProcessExpired):
        return Trouble("death", f"{function} ended its process (exit code {error.exitcode})")
    if isinstance(error, BrokenProcessPool):
        return None
    raise error


def stop_forkserver() -> None:
    """End the fork server, unless another part of the process still has children of it.

    The standard library ends it only with the process itself, and has no public way to do it earlier. It also waits
    until every process has ended that a reward function has forked.
    """
    if not multiprocessing.active_children():
        server: Any = multiprocessing.forkserver._forkserver
        if server._forkserver_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
