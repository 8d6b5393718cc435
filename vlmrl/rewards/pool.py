"""Starts and ends pools of scoring processes, and reads what became of a call."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from vlmrl.rewards import local_worker as worker
from vlmrl.rewards.failures import TooHardError
from vlmrl.types import Retry

START_LIMIT_S = 120.0
"""For importing the user's file, with whatever it loads."""
PATIENCE_S = 30.0
"""For killing a process that holds on and starting the next, beyond all limits, before a pool counts as stuck."""


_LONGEST_TMPDIR = 75
"""Characters. The path of a socket has at most 107, and the fork server's takes 32 beside the temporary folder."""


class Trouble(NamedTuple):
    """A call that ran too long or whose process died: it may go well the next time."""

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
    """Processes with the built-in functions `names` and the user's function `spec`, which sees of the environment's
    secrets those in `pass_env`, and whose prints go to `log`. With `max_tasks`, each ends after so many calls."""
    _make_folder_of_sockets()
    # Forking this process would copy locks that its threads hold (Ray, gRPC, vLLM). The fork server is a clean
    # process with math-verify already imported, so that a worker that had to be killed is replaced in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vlmrl.rewards.local_worker", *(f"vlmrl.rewards.{name}" for name in names)])
    return ProcessPool(
        max_workers=num_workers,
        max_tasks=max_tasks,
        context=context,
        initializer=worker.start,
        initargs=(names, spec, pass_env, log),
    )


def _make_folder_of_sockets() -> None:
    """Below /tmp where the temporary folder's path is too long for a socket: the fork server could not listen."""
    wanted = tempfile.gettempdir()
    if len(os.fsencode(wanted)) > _LONGEST_TMPDIR and os.access("/tmp", os.W_OK):
        tempfile.tempdir = "/tmp"
        try:
            util.get_temp_dir()  # it keeps the folder, for this process and for those that it starts
        finally:
            tempfile.tempdir = wanted


def end_pool(pool: ProcessPool) -> None:
    """Ends its processes, whatever they are doing."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


def outcome(future: ProcessFuture[Any], function: str, time_limit_s: float) -> Any | Trouble | None:
    """What the call returned, or why there is nothing; None when its pool broke before the call was made."""
    try:
        return future.result(timeout=0)
    except TimeoutError:
        if not future.done():
            return None
        return Trouble("timeout", f"{function} took longer than reward.time_limit_s {time_limit_s:g}")
    except TooHardError as error:
        return Trouble("timeout", f"{function}: {error}")
    except ProcessExpired as error:
        return Trouble("death", f"{function} ended its process (exit code {error.exitcode})")
    except (BrokenProcessPool, CancelledError):
        return None


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
