"""Compare the versions of installed packages with those that the project pins."""

import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Version:
    """A package that the project requires."""

    package: str
    installed: str | None
    wanted: str
    ok: bool


def versions(extra: str) -> list[Version]:
    """Return the packages that vlmrl's metadata require for the extra `cpu` or `gpu`, with their installed versions."""
    pattern = re.compile(r"""^([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;.*extra == ["'](\w+)["'].*)?$""")
    packages = []
    for line in metadata.requires("vlmrl") or []:
        match = pattern.match(line)
        if match is None or match[1] == "vlmrl" or match[3] not in (None, "stack", extra):
            continue
        package, wanted = match[1], match[2].strip("() ")
        try:
            installed: str | None = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = None
        # Versions may have a local suffix (+cpu), which does not count.
        exact = wanted.removeprefix("==") if wanted.startswith("==") else None
        ok = installed is not None and (exact is None or installed.split("+")[0] == exact)
        packages.append(Version(package, installed, wanted, ok))
    return sorted(packages, key=lambda version: (version.ok, version.package.lower()))
