"""Find out why torch cannot use this machine's NVIDIA devices, and which driver it needs. Standard library only."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

_DEVICE = Path("/dev/nvidiactl")
_VERSION = Path("/proc/driver/nvidia/version")
_LEAST = {"13": "580.65.06", "12": "525.60.13", "11": "450.80.02"}
"""Major version of CUDA -> the oldest driver that runs all its minor versions (NVIDIA's CUDA Compatibility, table of
minor version compatibility)."""


def has_gpu() -> bool:
    """Whether the NVIDIA driver shows a device, even if torch cannot use it."""
    return _DEVICE.exists()


def hides_gpus(visible: str | None) -> bool:
    """Whether this value of CUDA_VISIBLE_DEVICES hides every GPU; None if the variable is not set."""
    return visible is not None and visible.strip() in ("", "-1")


def shows_gpu() -> bool:
    """Whether this process may use a GPU: the driver shows one, and CUDA_VISIBLE_DEVICES does not hide it."""
    return has_gpu() and not hides_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))


def installed_driver(file: Path = _VERSION) -> str | None:
    """Version of the kernel's NVIDIA driver, like `535.161.08`; None where there is none."""
    try:
        match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", file.read_text())
    except OSError:
        return None
    return match[1] if match else None


def required_driver(cuda: str, driver: str) -> str | None:
    """Return the oldest driver that supports this version of CUDA, if `driver` is older; else None."""
    least = _LEAST.get(cuda.partition(".")[0])
    return least if least is not None and _numbers(driver) < _numbers(least) else None


def gpu_fault_and_fix(cuda: str | None, driver: str | None) -> tuple[str, str]:
    """Return the fault and what to do, if the driver shows a device and torch sees none.

    Args:
        cuda: version of CUDA that torch was built for, `torch.version.cuda`; None for a CPU build.
        driver: `installed_driver()`.
    """
    if cuda is None:
        return "torch is built for CPU", "run `make setup`, which installs torch for CUDA"
    least = None if driver is None else required_driver(cuda, driver)
    if least is not None:
        return (
            f"the NVIDIA driver {driver} is too old for torch built for CUDA {cuda}, which needs {least} or newer",
            f"install NVIDIA driver {least} or newer on the host (a container uses the host's)",
        )
    shown = f"NVIDIA driver {driver}" if driver else "the NVIDIA driver"
    return (
        f"torch built for CUDA {cuda} sees no device, though {shown} shows one",
        "check CUDA_VISIBLE_DEVICES, and whether `nvidia-smi` works here",
    )


def gpu_problem(
    cuda: str | None, *, is_available: bool, environ: Mapping[str, str] = os.environ, file: Path = _VERSION
) -> str | None:
    """Describe in one line why torch cannot use the GPU of this process; None if there is no problem.

    Without this check a rank would silently compute on CPU. `is_available` is `torch.cuda.is_available()`.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if is_available or visible is None or hides_gpus(visible) or not has_gpu():
        return None
    return ": ".join(gpu_fault_and_fix(cuda, installed_driver(file)))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
