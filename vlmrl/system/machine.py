"""Checks of a machine's resources, shared by `vlmrl doctor`, `--dry-run` and every run.

Each check returns its finding, how to fix a problem, and whether a run can work with it. Only `devices` imports a heavy
library, torch.
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
from vlmrl.startup.driver import gpu_fault_and_fix, has_gpu, hides_gpus, installed_driver, required_driver

GIB = 2**30
MIB = 2**20

_SHM = "start the container with `--shm-size=8g`, or run `mount -o remount,size=8g /dev/shm`"
_MIN_SHARED_MEMORY_BYTES = 256 * MIB
"""Bytes. With less, Ray puts the object store on disk, and says so only in a log."""
_MIN_DISK_BYTES = 256 * MIB
"""Bytes, for a tiny run's models, metrics and transcripts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    name: str
    ok: bool
    essential: bool
    """If not ok, `doctor` exits with 1 and runs are refused. A finding that is not essential is a warning."""
    detail: str
    fix: str = ""


def memory() -> Finding:
    """Check free main memory. A tiny run needs 4 GiB."""
    free, total = free_memory()
    fix = "close other programs, or give the container more memory"
    return _compare("memory", free, f"{free / GIB:.1f} GiB free of {total / GIB:.1f}", fix, wanted=4 * GIB, least=GIB)


def free_memory() -> tuple[int, int]:
    """(free, total) bytes of main memory, within a container's limit where there is one."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, free = (int(fields[key]) * 1024 for key in ("MemTotal", "MemAvailable"))
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        # Cached file pages count as used there, but the kernel frees them on demand.
        cached = int(re.findall(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)[0])
        total = min(total, int(limit))
        free = min(free, total - int((group / "memory.current").read_text()) + cached)
    return free, total


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Check free shared memory, through which weights are synced on CPU, and where Ray keeps the images."""
    name = "shared memory"
    if not folder.is_dir():
        return Finding(name, ok=False, essential=True, detail=f"{folder} is not there", fix=_SHM)
    space = shutil.disk_usage(folder)
    detail = f"{space.free / GIB:.2f} GiB free of {space.total / GIB:.2f} in {folder}"
    fix = f"delete stale files there, or {_SHM}"
    return _compare(name, space.free, detail, fix, wanted=GIB, least=_MIN_SHARED_MEMORY_BYTES)


def open_files() -> Finding:
    """Check how many files a process may open: every Ray actor holds dozens of sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 0:
        return Finding("open files", ok=True, essential=False, detail="any number of open files")
    limit = min(hard, 65536) if hard > 0 else 65536
    detail, fix = f"at most {soft} open files", f"run `ulimit -n {limit}` first"
    if limit < 1024:
        fix = "raise the hard limit, as root or with `--ulimit nofile=65536` of the container"
    return _compare("open files", soft, detail, fix, wanted=1024, least=256)


def loopback() -> Finding:
    """Check that TCP over loopback works, which Ray, vLLM and DeepSpeed use."""
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(5)
            client.connect(server.getsockname())
            detail = f"127.0.0.1:{server.getsockname()[1]} answers"
    except OSError as error:
        fix = "allow TCP on 127.0.0.1 (firewall, sandbox)"
        return Finding("loopback", ok=False, essential=True, detail=f"127.0.0.1: {error}", fix=fix)
    return Finding("loopback", ok=True, essential=True, detail=detail)


def disk(folder: Path | None = None, *, flag: str = "--ckpt.output_dir") -> Finding:
    """Check that the folder where a run would write, by default the working directory, is writable and has space.

    `flag` is the setting that names the folder, for messages.
    """
    # The run creates missing folders.
    folder = (folder or Path.cwd()).absolute()
    existing = next(path for path in (folder, *folder.parents) if _exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        detail = f"{existing} is not writable" if existing.is_dir() else f"{existing} is not a folder"
        fix = f"work in a folder of yours, or set {flag}"
        return Finding("disk", ok=False, essential=True, detail=detail, fix=fix)
    free = shutil.disk_usage(existing).free
    fix = "free some space, or work elsewhere"
    return _compare(
        "disk", free, f"{free / GIB:.1f} GiB free in {existing}", fix, wanted=5 * GIB, least=_MIN_DISK_BYTES
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # inside another user's folder
        return False


def driver() -> Finding:
    """Check that NVIDIA's driver is new enough for the CUDA version that torch was built for."""
    if not has_gpu():
        return Finding("driver", ok=True, essential=True, detail="no NVIDIA device: everything runs on CPU")
    cuda, installed = _cuda_of_torch(), installed_driver()
    if cuda is None or installed is None:
        detail = "its version cannot be read, or torch is not a CUDA build"
        return Finding("driver", ok=True, essential=True, detail=detail)
    if required_driver(cuda, installed) is None:
        return Finding("driver", ok=True, essential=True, detail=f"NVIDIA driver {installed}, CUDA {cuda}")
    fault, fix = gpu_fault_and_fix(cuda, installed)
    return Finding("driver", ok=False, essential=True, detail=fault, fix=fix)


def devices() -> Finding:
    """Check that torch can use the GPUs that the driver shows. Imports torch."""
    if not has_gpu():
        return Finding("devices", ok=True, essential=True, detail="no GPU: everything runs on CPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hides_gpus(visible):
        return Finding("devices", ok=True, essential=True, detail="CUDA_VISIBLE_DEVICES hides every GPU")
    import torch

    if torch.cuda.is_available():
        return Finding("devices", ok=True, essential=True, detail=f"torch sees {torch.cuda.device_count()} GPUs")
    suffix = f", and CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    fault, fix = gpu_fault_and_fix(torch.version.cuda, installed_driver())
    return Finding(
        "devices", ok=False, essential=True, detail=fault + suffix, fix=f"{fix}; CUDA_VISIBLE_DEVICES= runs on CPU"
    )


CHECKS: tuple[Callable[[], Finding], ...] = (memory, shared_memory, open_files, loopback, disk, driver)
"""Checks that `doctor` runs in its own process. It runs `devices` in another one, together with torch."""


def run_check(check: Callable[[], Finding]) -> Finding:
    """Run a check. An exception becomes a warning: files under /proc differ between kernels."""
    try:
        return check()
    except Exception as error:  # a check that fails is no reason to refuse a run
        name = check.__name__.replace("_", " ")
        detail = f"cannot be checked: {type(error).__name__}: {' '.join(str(error).split())}"
        return Finding(name, ok=False, essential=False, detail=detail, fix="look at the file that it names")


def run_checks(output: Path, *, joins_cluster: bool) -> list[Finding]:
    """Run all checks for a run that writes to `output`.

    A run that joins a cluster skips this machine's memory and devices: the cluster's machines may be different.
    """
    local: tuple[Callable[[], Finding], ...] = (memory, shared_memory, loopback, driver, devices)
    return [run_check(open_files), disk(output), *map(run_check, () if joins_cluster else local)]


def require(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding that is a warning.

    Raises ClusterError, with all findings that are not ok, if an essential one is among them.
    """
    problems = [finding for finding in findings if not finding.ok]
    lines = [f"{finding.name}: {finding.detail}: {finding.fix}" for finding in problems]
    if any(finding.essential for finding in problems):
        raise ClusterError("; ".join(lines))
    return lines


def _compare(name: str, amount: float, detail: str, fix: str, *, wanted: float, least: float) -> Finding:
    """Return a finding that is a warning below `wanted`, and essential below `least`."""
    if amount >= wanted:
        return Finding(name, ok=True, essential=True, detail=detail)
    return Finding(name, ok=False, essential=amount < least, detail=detail, fix=fix)


def _cuda_of_torch() -> str | None:
    """Return the CUDA version that torch was built for, like `12.8`, read without importing torch; None if there is
    none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    match = re.search(r"^cuda\b.*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return None if match is None else match[1]
