"""Two simulated machines: network namespaces joined by a virtual cable, each with its own /dev/shm and Ray node.

The name of either machine resolves to the loopback, as names often do.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmrl.system import fork_server

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 6379
_BIN = Path(sys.executable).parent
_PREFIX = "vlmrl-"
_count = itertools.count()


def why_not() -> str | None:
    """Return why this machine cannot simulate two, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    name = f"{_PREFIX}{os.getpid()}-x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    alone = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    return f"no mounts of its own: {alone.stderr.strip()}" if alone.returncode != 0 else None


class TwoMachines:
    """Two machines. Drivers run on the one with Ray's head node: because Ray sees the processes of both machines, it
    connects any driver to the head. Names of namespaces and cables are unique to this process."""

    def __init__(self, folder: Path, *, head: int) -> None:
        """`folder` has a short name: Ray makes sockets below it, whose paths have room for 107 characters."""
        self.folder = folder
        self.head = head
        self._ray = f"{ADDRESSES[head]}:{PORT}"
        self._tag = f"{os.getpid()}-{next(_count)}"
        self._names = [f"{_PREFIX}{self._tag}{letter}" for letter in "ab"]
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.connect()
        self._start_node(self.head, "--head", f"--port={PORT}", "--include-dashboard=false")
        self._wait(lambda: self._reaches(self._ray), "the head does not respond")

    def join(self) -> None:
        """Let the machine without the head join."""
        self._start_node(1 - self.head, f"--address={self._ray}")
        self._wait(self._has_joined, "the other machine did not join")

    def connect(self) -> None:
        """Make the two namespaces and the cable between them."""
        for name in self._names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        ends = [f"v{self._tag}{letter}" for letter in "ab"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self._names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", "eth0")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def popen(self, machine: int, words: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Start a process on a machine that can reach the Ray cluster."""
        inside = ["nsenter", "-t", str(self._nodes[machine].pid), "-n", "-m", f"--wd={Path.cwd()}"]
        # The tests' fork server is on this machine.
        variables = os.environ | {"RAY_ADDRESS": self._ray, fork_server.VARIABLE: ""} | dict(env or {})
        return subprocess.Popen([*inside, *words], env=variables, **options)

    def run(self, machine: int, words: Sequence[str], *, timeout_s: float = 240, **options: Any) -> tuple[int, str]:
        """Run a command; return its exit code and output."""
        with self.popen(
            machine, words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                raise AssertionError(f"not done after {timeout_s:g} s:\n{output[-3000:]}") from None
        return process.returncode, output

    @contextmanager
    def covered(self, machine: int, target: Path, by: Path | None = None) -> Iterator[None]:
        """Replace a file by another, or a folder by an empty one, on this machine only."""
        what = ["--bind", str(by)] if by is not None else ["-t", "tmpfs", "tmpfs"]
        assert self.run(machine, ["mount", *what, str(target)]) == (0, "")
        try:
            yield
        finally:
            assert self.run(machine, ["umount", "-l", str(target)]) == (0, "")

    def processes(self, machine: int) -> list[int]:
        done = subprocess.run(
            ["ip", "netns", "pids", self._names[machine]], capture_output=True, text=True, check=False
        )
        return [int(word) for word in done.stdout.split()]

    def commands(self, machine: int) -> dict[int, str]:
        """Return the command lines of the machine's processes."""
        lines = {}
        for pid in self.processes(machine):
            try:
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it has just ended
                continue
        return lines

    def shared_memory(self, machine: int) -> set[str]:
        """Return the names in the machine's /dev/shm."""
        return {path.name for path in Path(f"/proc/{self._nodes[machine].pid}/root/dev/shm").iterdir()}

    def kill(self, machine: int) -> None:
        """Kill all processes of the machine at once."""
        for pid in self.processes(machine):
            _signal(pid, signal.SIGKILL)

    def cut(self, machine: int) -> None:
        """Cut the machine off the network without closing its connections."""
        _ip("-n", self._names[machine], "link", "set", "eth0", "down")

    def stop(self) -> None:
        end = time.monotonic() + 10
        while (pids := [*self.processes(0), *self.processes(1)]) and time.monotonic() < end:
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            for node in self._nodes.values():
                node.poll()
            time.sleep(0.1)
        for node in self._nodes.values():
            node.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _start_node(self, machine: int, *words: str) -> None:
        script = 'mount -t tmpfs -o size=4g tmpfs /dev/shm && exec "$@"'
        node = ["ip", "netns", "exec", self._names[machine], "unshare", "-m", "bash", "-c", script, "-"]
        ray = [str(_BIN / "ray"), "start", *words, f"--node-ip-address={ADDRESSES[machine]}", "--block"]
        room = ["--num-cpus=1", "--object-store-memory=300000000", f"--temp-dir={self.folder / str(machine)}"]
        log = (self.folder / f"{machine}.log").open("wb")
        with log:
            self._nodes[machine] = subprocess.Popen([*node, *ray, *room], stdout=log, stderr=log, env=_plain())

    def _wait(self, is_there: Any, what: str) -> None:
        end = time.monotonic() + 90
        while not is_there():
            dead = [node for node in self._nodes.values() if node.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(log.read_text()[-1500:] for log in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"{what}:\n{logs}")
            time.sleep(0.3)

    def _reaches(self, address: str) -> bool:
        return self.run(self.head, ["bash", "-c", f"exec 3<>/dev/tcp/{address.replace(':', '/')}"])[0] == 0

    def _has_joined(self) -> bool:
        return "Ray runtime started." in (self.folder / f"{1 - self.head}.log").read_text()


def remove_left_behind() -> None:
    """Clean up after a process that was killed before it could do so."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(_PREFIX)):
        if not Path(f"/proc/{name.removeprefix(_PREFIX).partition('-')[0]}").exists():
            for pid in _processes(name):
                _signal(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _processes(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def _plain() -> dict[str, str]:
    """Return this environment without variables that point to a Ray cluster or to the tests' fork server."""
    return {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", fork_server.VARIABLE)}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@contextmanager
def two_machines(*, head: int = 0, joins: bool = True) -> Iterator[TwoMachines]:
    """Both machines, the other one in the cluster of the head's unless `joins` is False."""
    remove_left_behind()
    folder = Path(tempfile.mkdtemp(prefix="vl", dir="/tmp"))
    machines = TwoMachines(folder, head=head)
    try:
        machines.start()
        if joins:
            machines.join()
        yield machines
    finally:
        machines.stop()
        shutil.rmtree(folder, ignore_errors=True)
