"""What a machine must have before anything starts there. One list, for `vlmrl doctor`, `--dry-run` and every run.

Each check looks and says what it found, how to mend it, and whether a run can do with it. None imports a heavy library
but `devices`, which asks torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmrl.errors import ClusterError
from vlmrl.startup.driver import has_gpu, hides_gpus, installed_driver, mend_of_gpu, wanted_driver

GIB = 2**30
MIB = 2**20

_SHM = "start the container with `--shm-size=8g`, or run `mount -o remount,size=8g /dev/shm`"
_LEAST_SHARED_MEMORY = 256 * MIB
"""Bytes. Below this Ray would put the object store on disk, and say so only in a log."""
_LEAST_DISK = 256 * MIB
"""Bytes. A tiny run's models, metrics and transcripts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to a check."""

    name: str
    ok: bool
    essential: bool
    """Without it nothing trains: `doctor` exits with 1 and a run is refused. What is not ok but not essential is a
    warning."""
    detail: str
    mend: str = ""


def memory() -> Finding:
    """Free main memory. A tiny run needs 4 GiB."""
    free, total = free_memory()
    mend = "close other programs, or give the container more memory"
    return _enough("memory", free, f"{free / GIB:.1f} GiB free of {total / GIB:.1f}", mend, wanted=4 * GIB, least=GIB)


def free_memory() -> tuple[int, int]:
    """(free, all) bytes of main memory, inside a container's limit where there is one."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, free = (int(fields[key]) * 1024 for key in ("MemTotal", "MemAvailable"))
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        # Cached file pages count as used there, but the kernel gives them up when asked.
        cached = int(re.findall(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)[0])
        total = min(total, int(limit))
        free = min(free, total - int((group / "memory.current").read_text()) + cached)
    return free, total


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Free shared memory, over which weights travel on CPU and in which Ray keeps the images."""
    name = "shared memory"
    if not folder.is_dir():
        return Finding(name, ok=False, essential=True, detail=f"{folder} is not there", mend=_SHM)
    space = shutil.disk_usage(folder)
    found = f"{space.free / GIB:.2f} GiB free of {space.total / GIB:.2f} in {folder}"
    mend = f"delete stale files there, or {_SHM}"
    return _enough(name, space.free, found, mend, wanted=GIB, least=_LEAST_SHARED_MEMORY)


def open_files() -> Finding:
    """How many files a process may open: every actor of Ray holds dozens of sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 0:
        return Finding("open files", ok=True, essential=False, detail="any number of open files")
    most = min(hard, 65536) if hard > 0 else 65536
    found, mend = f"at most {soft} open files", f"run `ulimit -n {most}` first"
    return _enough("open files", soft, found, mend, wanted=1024, least=256)


def loopback() -> Finding:
    """Whether a server on this machine can be reached from it: Ray, vLLM and DeepSpeed all talk over loopback."""
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(5)
            client.connect(server.getsockname())
            found = f"127.0.0.1:{server.getsockname()[1]} answers"
    except OSError as error:
        mend = "allow TCP on 127.0.0.1 (firewall, sandbox)"
        return Finding("loopback", ok=False, essential=True, detail=f"127.0.0.1: {error}", mend=mend)
    return Finding("loopback", ok=True, essential=True, detail=found)


def disk(folder: Path | None = None, *, flag: str = "--ckpt.output_dir") -> Finding:
    """Free space where a run would write, and that it can be written to; by default the folder where the user is.

    `flag` is the setting that names the folder, for messages.
    """
    # The run makes the folders that are not there yet.
    folder = (folder or Path.cwd()).absolute()
    there = next(path for path in (folder, *folder.parents) if _is_seen(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        found = f"{there} cannot be written to" if there.is_dir() else f"{there} is no folder"
        mend = f"work in a folder of yours, or set {flag}"
        return Finding("disk", ok=False, essential=True, detail=found, mend=mend)
    free = shutil.disk_usage(there).free
    mend = "free some space, or work elsewhere"
    return _enough("disk", free, f"{free / GIB:.1f} GiB free in {there}", mend, wanted=5 * GIB, least=_LEAST_DISK)


def _is_seen(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # it lies in somebody else's folder
        return False


def driver() -> Finding:
    """Whether NVIDIA's driver is new enough for the CUDA that torch was built for."""
    if not has_gpu():
        return Finding("driver", ok=True, essential=True, detail="no NVIDIA device, and none is needed on CPU")
    cuda, installed = _cuda_of_torch(), installed_driver()
    if cuda is None or installed is None:
        found = "its version cannot be read, or torch is no CUDA build"
        return Finding("driver", ok=True, essential=True, detail=found)
    if wanted_driver(cuda, installed) is None:
        return Finding("driver", ok=True, essential=True, detail=f"NVIDIA driver {installed}, CUDA {cuda}")
    wrong, mend = mend_of_gpu(cuda, installed)
    return Finding("driver", ok=False, essential=True, detail=wrong, mend=mend)


def devices() -> Finding:
    """Whether torch computes on the GPUs that the driver shows. Imports torch."""
    if not has_gpu():
        return Finding("devices", ok=True, essential=True, detail="no GPU, so that everything runs on CPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hides_gpus(visible):
        return Finding("devices", ok=True, essential=True, detail="CUDA_VISIBLE_DEVICES hides every GPU")
    import torch

    if torch.cuda.is_available():
        return Finding("devices", ok=True, essential=True, detail=f"torch sees {torch.cuda.device_count()} GPUs")
    why = f", and CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    wrong, mend = mend_of_gpu(torch.version.cuda, installed_driver())
    return Finding(
        "devices", ok=False, essential=True, detail=wrong + why, mend=f"{mend}; CUDA_VISIBLE_DEVICES= runs on CPU"
    )


CHECKS: tuple[Callable[[], Finding], ...] = (memory, shared_memory, open_files, loopback, disk, driver)
"""What `doctor` asks of the machine in its own process. It asks `devices` in another one, together with torch."""


def look(check: Callable[[], Finding]) -> Finding:
    """What a check finds. One that cannot look, since files under /proc differ from kernel to kernel, is a warning."""
    try:
        return check()
    except Exception as error:  # what it met is its answer, and no reason to stop what would run
        name = check.__name__.replace("_", " ")
        detail = f"cannot be looked at: {type(error).__name__}: {' '.join(str(error).split())}"
        return Finding(name, ok=False, essential=False, detail=detail, mend="look at what it names")


def examine(output: Path, *, joins: bool) -> list[Finding]:
    """All checks before a run that writes to `output`; those of this machine's devices and memory are left out where it
    `joins` a cluster, whose machines need not be like this one.
    """
    here: tuple[Callable[[], Finding], ...] = () if joins else (memory, shared_memory, loopback, driver, devices)
    return [look(open_files), disk(output), *map(look, here)]


def require(findings: Sequence[Finding]) -> list[str]:
    """One line for each finding that is short of what is wanted but will do.

    Raises ClusterError, naming everything at once, when something is lacking without which nothing runs.
    """
    lacking = [finding for finding in findings if not finding.ok]
    lines = [f"{finding.name}: {finding.detail}: {finding.mend}" for finding in lacking]
    if any(finding.essential for finding in lacking):
        raise ClusterError("; ".join(lines))
    return lines


def _enough(name: str, amount: float, found: str, mend: str, *, wanted: float, least: float) -> Finding:
    """Below `wanted` it is a warning, below `least` nothing runs."""
    if amount >= wanted:
        return Finding(name, ok=True, essential=True, detail=found)
    return Finding(name, ok=False, essential=amount < least, detail=found, mend=mend)


def _cuda_of_torch() -> str | None:
    """`12.8` or the like, read from torch's files without importing it; None for another build, and without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    match = re.search(r"^cuda\b.*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return None if match is None else match[1]
