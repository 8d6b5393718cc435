"""Which packages the project pins, and which versions of them are installed."""

import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Version:
    """A package that the project pins or wants."""

    package: str
    installed: str | None
    wanted: str
    ok: bool


def versions(extra: str) -> list[Version]:
    """What vlmrl's own metadata pins for this kind of machine, `cpu` or `gpu`, beside what is installed."""
    pattern = re.compile(r"""^([A-Za-z0-9._-]+)\s*([^;]*?)\s*(?:;.*extra == ["'](\w+)["'].*)?$""")
    found = []
    for line in metadata.requires("vlmrl") or []:
        match = pattern.match(line)
        if match is None or match[1] == "vlmrl" or match[3] not in (None, "stack", extra):
            continue
        package, wanted = match[1], match[2].strip("() ")
        try:
            installed: str | None = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = None
        # A local suffix (+cpu) does not make it another version.
        exact = wanted.removeprefix("==") if wanted.startswith("==") else None
        ok = installed is not None and (exact is None or installed.split("+")[0] == exact)
        found.append(Version(package, installed, wanted, ok))
    return sorted(found, key=lambda version: (version.ok, version.package.lower()))
