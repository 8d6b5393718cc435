"""Fork server of environments: a process that has imported what they need, of which all their processes are forks.

A fork starts in milliseconds, and this process alone is the parent of all: it reports how they end, and ends them with
whatever they have started themselves, also when the run is killed. It has no secrets, and imports nothing of the
user's: a fork is safe only from a process of one thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from vlmrl.agents import worker
from vlmrl.agents.messages import Mode, Orders
from vlmrl.system.environment_variables import hide_secrets
from vlmrl.system.lifeline import die_with
from vlmrl.system.output import print_to
from vlmrl.system.stops import accept_sigterm

_PR_SET_CHILD_SUBREAPER = 36
_MAX_ORDER_BYTES = 64
_END_LIMIT_S = 10.0
_PAUSE_S = 0.01
_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from vlmrl.agents.spawner import serve
serve(int(sys.argv[2]), sys.argv[3])
"""


class Spawner:
    """Starts and ends processes. Belongs to one event loop."""

    def __init__(self, orders: Orders, *, pass_env: tuple[str, ...] = ()) -> None:
        """Start the server. Processes see the secrets of the environment that `pass_env` names."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ)
        hide_secrets(environment, keep=pass_env)
        with theirs:
            self._server = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c", _CODE, json.dumps([path or str(Path.cwd()) for path in sys.path])),
                    *(str(theirs.fileno()), msgspec.json.encode(orders).decode()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Threads that a library starts when it is imported do not survive a fork.
                env=environment | {"OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._control.setblocking(False)
        self._numbers = itertools.count(1)
        self._on_end: dict[int, Callable[[int | None], None]] = {}
        """Number of a process -> its function."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control, self._receive)
        self.is_running = True

    async def start(self, mode: Mode, connection: socket.socket, end: Callable[[int | None], None]) -> int:
        """Start a process that serves the calls of `connection`, and return its number.

        `end` is called with its exit code, or minus its signal, when it has ended; with None if that is unknown, or if
        the server is lost before the process starts.
        """
        number = next(self._numbers)
        self._on_end[number] = end
        order = json.dumps([number, mode]).encode()
        while self.is_running:
            try:
                socket.send_fds(self._control, [order], [connection.fileno()])
                return number
            except BlockingIOError:
                await asyncio.sleep(_PAUSE_S)
            except OSError:
                self._lose()
        if number in self._on_end:  # the server was lost before
            self._on_end.pop(number)(None)
        return number

    def kill(self, number: int) -> None:
        """Have a process killed, and those that it has started."""
        if not self.is_running or number not in self._on_end:
            return
        try:
            self._control.send(json.dumps([number, "kill"]).encode())
        except BlockingIOError:
            self._loop.call_later(_PAUSE_S, self.kill, number)
        except OSError:
            self._lose()

    async def close(self) -> None:
        """End all processes. Idempotent."""
        self._lose()
        try:
            await asyncio.to_thread(self._server.wait, _END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()  # the kernel kills the others with it
            await asyncio.to_thread(self._server.wait)

    def _receive(self) -> None:
        try:
            message = self._control.recv(_MAX_ORDER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lose()
            return
        number, code = json.loads(message)
        if number in self._on_end:
            self._on_end.pop(number)(code)

    def _lose(self) -> None:
        """Close the connection to the server, which ends all processes."""
        if not self.is_running:
            return
        self.is_running = False
        self._loop.remove_reader(self._control)
        self._control.close()
        while self._on_end:
            self._on_end.popitem()[1](None)


def serve(control: int, encoded_orders: str) -> None:
    """Be the server: fork a process for each order, and report its end, until the run closes the connection or ends.

    Args:
        control: a descriptor, of the connection to the run.
    """
    orders = msgspec.json.decode(encoded_orders, type=Orders)
    accept_sigterm()
    if orders.log is not None:
        print_to(Path(orders.log))
    if sys.platform == "linux":
        # Processes whose parent has ended become children of this one.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # else the first collection in a fork would copy every object
    try:
        with suppress(ConnectionError):  # the run was killed before it had read all reports
            _Server(socket.socket(fileno=control), orders).run()
    finally:
        _kill_all()


class _Server:
    def __init__(self, control: socket.socket, orders: Orders) -> None:
        self._control, self._orders = control, orders
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._numbers: dict[int, int] = {}
        """Process -> its number."""

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        while True:
            watched: list[Any] = [self._control, self._wake]
            ready, _, _ = select.select(watched, [], [])
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if self._control in ready:
                message, descriptors, _, _ = socket.recv_fds(self._control, _MAX_ORDER_BYTES, 1)
                if not message:
                    return
                number, order = json.loads(message)
                self._obey(number, order, descriptors)

    def _obey(self, number: int, order: Mode | Literal["kill"], descriptors: list[int]) -> None:
        if order == "kill":
            for pid in [pid for pid, known in self._numbers.items() if known == number]:
                _kill(pid)
            return
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes
            self._report(number, None)
        else:
            if pid == 0:
                self._become_worker(server, descriptors[0], order)
            self._numbers[pid] = number
        for descriptor in descriptors:
            os.close(descriptor)

    def _become_worker(self, server: int, connection: int, mode: Mode) -> None:
        code = 1
        try:
            os.setsid()  # its own session, by which the processes that it starts are found
            die_with(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (self._control.detach(), self._wake, self._woken):
                os.close(descriptor)
            random.seed()
            np.random.seed()  # noqa: NPY002 - the generator that every fork would share
            with suppress(ConnectionError):  # the run has ended
                worker.main(socket.socket(fileno=connection), self._orders, mode)
            code = 0
        except BaseException:
            with suppress(Exception):
                traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Report the processes that have ended, and kill what they have left."""
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = ended.si_pid
                number = self._numbers.pop(pid, None)
                if number is not None:
                    _kill(pid)  # before its id may be that of another
                _, status = os.waitpid(pid, 0)
                if number is not None:
                    self._report(number, os.waitstatus_to_exitcode(status))

    def _report(self, number: int, code: int | None) -> None:
        with suppress(OSError):  # the run has ended
            self._control.send(json.dumps([number, code]).encode())


def _kill(pid: int) -> None:
    """Kill a process, its session and its descendants. Daemons in a session of their own live until the run ends."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # it starts no more
    family, processes = {pid}, list(_processes())
    while more := {child for child, parent, session in processes if parent in family or session == pid} - family:
        family |= more
    for member in family:
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def _kill_all() -> None:
    """Kill all descendants: orphans among them become children of this process."""
    while True:
        for child, parent, _ in _processes():
            if parent == os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _processes() -> Iterator[tuple[int, int, int]]:
    """(process, its parent, its session) of all processes of this machine."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                words = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(folder.name), int(words[1]), int(words[3])
