"""Checks of the self-test, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "failed", "skipped"]


class Broken(Exception):  # noqa: N818 - the result of a check, not a fault in it
    """A failed check: the message, and optionally settings that avoid the broken part, instead of `Check.avoid`."""


class Skipped(Exception):  # noqa: N818 - not an error: there is nothing to check here
    """A check that cannot run on this machine: the reason."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the report."""

    check: str
    state: State
    seconds: float
    figure: str
    """The measurement, the fault, or the reason for skipping."""
    avoid: str = ""
    """Settings that avoid the broken part, if the check failed."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a capability that runs rely on."""

    name: str
    function: str
    """`module:function`, which takes the theme's shared state; returns the figure, or raises `Broken` or `Skipped`."""
    avoid: str
    """Settings that avoid the capability."""
    limit_s: float = 60.0
    """A check that takes longer fails."""
    needs_gpu: bool = False
    """Skipped where there is no NVIDIA device."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Checks that share a process and its set-up."""

    name: str
    checks: tuple[Check, ...]
    setup: str = "vlmrl.commands.self_test.child:scratch"
    """`module:function`, which takes a folder; a context manager that yields the checks' shared state."""
    limit_s: float = 120.0
    """Time limit for imports and set-up."""
    avoid: str = "see the message"
    """Settings to name when the set-up fails and does not name any itself."""
