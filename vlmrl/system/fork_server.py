"""Fork server: one process that has imported the heavy libraries, of which workers on this machine are forks.

Importing PyTorch, vLLM and DeepSpeed takes each worker many seconds of a core, and a run on CPU starts five of them. A
fork has everything imported at once, and shares its memory until it writes there.

The server's command takes the place of Python for Ray's workers and for vLLM's engine core: it hands its arguments,
environment, working directory, descriptors, signals and limits to the server, waits for the fork, and ends as that
ended (`fork_client.py`). Where the server cannot fork, the command becomes an ordinary Python.

A fork is safe only from a process of one thread, and without CUDA: the server refuses otherwise.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import logging
import os
import random
import resource
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psutil

from vlmrl import startup
from vlmrl.startup.driver import has_gpu
from vlmrl.system import stops
from vlmrl.system.exits import end_process, format_exit, log_tail
from vlmrl.system.lifeline import die_with

VARIABLE = "VLMRL_FORK_SERVER"
"""Environment variable: the command that takes the place of Python, while a server runs."""
MODULES = (
    "transformers",
    "peft",
    "vlmrl.learning.deepspeed_engine",
    "vlmrl.learning.policy",
    "vlmrl.rollout.worker_extension",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
)
"""Imported by the server, in this order."""
_CLIENT = Path(__file__).with_name("fork_client.py")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""A job scheduler sends them to every process of a run. They are for the forks, not for those that look after them."""


@contextmanager
def fork_server(folder: Path, modules: Sequence[str] = MODULES) -> Iterator[None]:
    """Run a server and name its command in the environment variable `VARIABLE`; end it, and its forks, at the end.

    Does nothing where the variable names a command already, where a GPU must not be used before a fork, where workers
    belong to a cluster that the user has started, and where this system has not what it needs.

    Args:
        folder: a private folder, for the server's socket, command and log.
        modules: what it imports.
    """
    is_cluster = os.environ.get("RAY_ADDRESS", "") not in startup.LOCAL_ADDRESSES
    server = None if is_cluster or has_gpu() or has_fork_server() else _start(folder, modules)
    if server is None:
        yield
        return
    os.environ[VARIABLE] = str(folder / "python")
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if server.poll() is not None:
            ended = format_exit(server.returncode, is_out_of_memory=False)
            reason = log_tail(folder / "fork_server.log").strip().rpartition("\n")[2] or "it wrote no reason"
            logging.getLogger(__name__).warning(
                "the fork server %s (%s): its workers ended with it, and others started slowly", ended, reason
            )
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(server.pid).children(recursive=True)
            server.kill()
            stops.kill_processes(family)
        server.communicate()


def has_fork_server() -> bool:
    """Whether the environment names the command of a server."""
    return Path(os.environ.get(VARIABLE) or "/nonexistent").exists()


def _start(folder: Path, modules: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """Start the server and write its command; None if this system cannot run them."""
    address, command = folder / "fork", folder / "python"
    words = [sys.executable, "-IS", str(_CLIENT), str(address), sys.executable]
    try:
        os.close(os.pidfd_open(os.getpid()))
        command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        command.chmod(0o700)
        if not os.access(command, os.X_OK):
            raise PermissionError(f"{folder} is mounted with noexec")
        with socket.socket(socket.AF_UNIX) as listener, (folder / "fork_server.log").open("wb") as log:
            listener.bind(str(address))
            listener.listen(128)  # clients wait while the server imports
            return subprocess.Popen(
                # -P: modules in the working directory are not those of libraries.
                [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(listener.fileno()), *modules],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Threads that a library starts when it is imported do not survive a fork.
                env=os.environ | startup.environment() | {"OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
    except OSError as error:  # an old kernel, a path that is too long for a socket, no memory
        _warn(f"no fork server, so workers start slowly: {error}")
        return None


@cache
def _warn(message: str) -> None:
    """Warn once: a run starts a server for its checks, and tries again for its Ray."""
    logging.getLogger(__name__).warning(message)


class _Request(NamedTuple):
    """A Python process that a client asks for."""

    arguments: list[str]
    """Of the `python` command: `-c`, code and more, or a script and more."""
    folder: str
    environment: dict[str, str]
    descriptors: list[int]
    niceness: int
    blocked: list[int]
    """Signals."""
    ignored: list[int]
    max_descriptors: tuple[int, int]
    oom_score_adjustment: str


def serve(owner: int, listener: socket.socket, modules: Sequence[str]) -> None:
    """Import `modules`, then fork a process for each client, until standard input or the process `owner` ends."""
    die_with(owner)  # also while it imports, when it does not look at standard input
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    before = dict(os.environ)
    # The fork of a process that has imported Ray cannot connect to anything. vLLM imports it where it can.
    sys.modules["ray"] = None  # type: ignore[assignment]
    for module in modules:
        importlib.import_module(module)
    del sys.modules["ray"]
    with suppress(ImportError):
        from setproctitle import getproctitle

        getproctitle()  # finds the place of the title, which forks could not
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads > 1:
        raise RuntimeError(f"the imports have started {threads - 1} threads, which a fork would lack")
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()  # else the first collection in a fork would write to, and so copy, every object
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(sys.stdin, select.POLLHUP)
    while all(descriptor == listener.fileno() for descriptor, _ in poll.poll()):
        connection = listener.accept()[0]
        with connection, suppress(OSError):  # where no process can be forked, the client becomes an ordinary Python
            server = os.getpid()
            if os.fork() == 0:
                listener.close()
                with suppress(OSError):
                    die_with(server)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _attend(connection, imported)
                os._exit(0)


def _attend(connection: socket.socket, imported: dict[str, str]) -> None:
    """Fork the process that a client asks for, hand on its signals, and report its end. Ends it if the client ends."""
    request, descriptors = _read(connection)
    attendant = os.getpid()
    child = os.fork()
    if child == 0:
        connection.close()
        die_with(attendant)
        _become(request, descriptors, imported)
    for descriptor in descriptors:
        os.close(descriptor)
    pidfd = os.pidfd_open(child)
    connection.sendall(b"!")
    while True:
        ready, _, _ = select.select([pidfd, connection.fileno()], [], [])
        if pidfd in ready:
            connection.sendall(b"%d" % os.waitpid(child, 0)[1])
            return
        number = connection.recv(1)
        signal.pidfd_send_signal(pidfd, number[0] if number else signal.SIGKILL)
        if not number:
            os.waitpid(child, 0)
            return


def _read(connection: socket.socket) -> tuple[_Request, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 253)
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            raise BrokenPipeError
        data += more
    return _Request(*json.loads(data)), descriptors


def _become(request: _Request, descriptors: Sequence[int], imported: dict[str, str]) -> None:
    """Turn this fork into the process that the client asks for, and end with it."""
    code: Any = 1
    try:
        os.setpgid(0, 0)  # Ray ends a worker by its group
        _place(descriptors, request.descriptors)
        resource.setrlimit(resource.RLIMIT_NOFILE, request.max_descriptors)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(request.oom_score_adjustment)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(imported | request.environment)
        os.nice(max(0, request.niceness - os.nice(0)))
        _open_streams(request.descriptors)
        _forget_state()
        _apply(request.environment)
        for number in request.ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
        _run(request.arguments)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(code)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors these numbers, and close all others."""
    first_free = max((*descriptors, *numbers, 2)) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, first_free) for descriptor in descriptors]
    os.closerange(0, first_free)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _open_streams(descriptors: Sequence[int]) -> None:
    """Open standard input, output and error as Python does."""
    modes = {"stdin": ("r", "strict"), "stdout": ("w", "strict"), "stderr": ("w", "backslashreplace")}
    for number, (name, (mode, errors)) in enumerate(modes.items()):
        stream = None
        if number in descriptors:
            stream = os.fdopen(number, mode, buffering=1, errors=errors, closefd=False)
        setattr(sys, name, stream)


def _forget_state() -> None:
    """Reset state that must not be the same in all forks."""
    random.seed()
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed()  # noqa: NPY002 - the generator that every fork would share


def _apply(environment: Mapping[str, str]) -> None:
    """Apply variables that libraries have read already, when the server imported them."""
    if "torch" in sys.modules:
        import torch

        if environment.get("OMP_NUM_THREADS", "").isdigit():
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if "torch._dynamo" in sys.modules and environment.get("TORCH_COMPILE_DISABLE") == "1":
        torch._dynamo.config.disable = True
    if environment.get("HF_HUB_OFFLINE") == "1":
        startup.work_offline()


def _run(arguments: Sequence[str]) -> None:
    """Run code or a script as `python` would."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    code: str | bytes
    if arguments[0] == "-c":
        code, name = arguments[1], "<string>"
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
    else:
        name = arguments[0]
        code = Path(name).read_bytes()
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(name).parent))
        main.__file__ = name
    exec(compile(code, name, "exec", dont_inherit=True), vars(main))  # noqa: S102 - it is what the client was given


if __name__ == "__main__":
    startup.prepare()
    serve(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
