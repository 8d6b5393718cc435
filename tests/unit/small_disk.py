"""A disk that a test can fill: a tmpfs. Without permission to mount, the test is skipped with the reason."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, mib: int) -> Iterator[Path]:
    """Within the context, `folder` is a disk of the given size in MiB."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs, which is not allowed here")
    try:
        yield folder
    finally:
        # Lazily: the traceback of an error in a test may still hold a file open.
        subprocess.run(["umount", "--lazy", folder], check=True)


def turn_read_only(folder: Path) -> None:
    """Remount the disk read-only, as the kernel does when it fails."""
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
