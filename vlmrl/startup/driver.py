"""Why torch cannot use the NVIDIA devices of this machine, and which driver would do. Standard library only."""

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
    """Whether the NVIDIA driver shows a device, whatever torch thinks of it."""
    return _DEVICE.exists()


def hides_gpus(visible: str | None) -> bool:
    """Whether a CUDA_VISIBLE_DEVICES hides every GPU on purpose. None: it is not set."""
    return visible is not None and visible.strip() in ("", "-1")


def shows_gpu() -> bool:
    """Whether this process may use one: the driver shows a device, and the user does not hide it."""
    return has_gpu() and not hides_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))


def installed_driver(file: Path = _VERSION) -> str | None:
    """Version of the kernel's NVIDIA driver, `535.161.08`; None where there is none."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", file.read_text())
    except OSError:
        return None
    return found[1] if found else None


def wanted_driver(cuda: str, driver: str) -> str | None:
    """The oldest driver that runs CUDA `cuda`, where `driver` is older than that; else None."""
    least = _LEAST.get(cuda.partition(".")[0])
    return least if least is not None and _numbers(driver) < _numbers(least) else None


def mend_of_gpu(cuda: str | None, driver: str | None) -> tuple[str, str]:
    """(what is wrong, what to do), where the driver shows a device and torch sees none.

    Args:
        cuda: version of CUDA that torch was built for, `torch.version.cuda`; None for a CPU build.
        driver: `installed_driver()`.
    """
    if cuda is None:
        return "torch is built for CPU", "run `make setup`, which installs torch for CUDA"
    least = None if driver is None else wanted_driver(cuda, driver)
    if least is not None:
        return (
            f"the NVIDIA driver {driver} is too old for torch built for CUDA {cuda}, which wants {least} or newer",
            f"install NVIDIA driver {least} or newer on the host (a container uses the host's)",
        )
    shown = f"NVIDIA driver {driver}" if driver else "the NVIDIA driver"
    return (
        f"torch built for CUDA {cuda} sees no device, though {shown} shows one",
        "check CUDA_VISIBLE_DEVICES, and whether `nvidia-smi` works here",
    )


def problem_of_gpu(
    cuda: str | None, *, is_available: bool, environ: Mapping[str, str] = os.environ, file: Path = _VERSION
) -> str | None:
    """One line when this process was given a GPU that torch cannot use; None when all is well.

    Without it a rank would compute on CPU and never tell. `is_available` is `torch.cuda.is_available()`.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if is_available or visible is None or hides_gpus(visible) or not has_gpu():
        return None
    return ": ".join(mend_of_gpu(cuda, installed_driver(file)))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
