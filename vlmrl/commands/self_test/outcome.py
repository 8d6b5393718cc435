"""What a check of the self-test finds: ok, the mend, or the reason why it cannot run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "failed", "skipped"]


class Broken(Exception):  # noqa: N818 - it is what a check says, not a fault of the check
    """The machine does not do what a run relies on. The second argument names the settings that avoid the broken part,
    where the check knows better than its entry in the list."""


class Skipped(Exception):  # noqa: N818 - no error: there is nothing to check here
    """The check cannot run on this machine; says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the report."""

    check: str
    state: State
    seconds: float
    figure: str
    """What was measured, what is wrong, or why it was skipped."""
    avoid: str = ""
    """Of a failure: the settings that do without the broken part."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a run relies on."""

    name: str
    function: str
    """`module:function` of what its theme has set up; returns the figure, or raises `Broken` or `Skipped`."""
    avoid: str
    """Settings that do without it."""
    limit_s: float = 60.0
    """A check that takes longer has failed."""
    needs_gpu: bool = False
    """Skipped without starting a process where no NVIDIA device is."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Checks that share a process, and what it has set up."""

    name: str
    checks: tuple[Check, ...]
    setup: str = "vlmrl.commands.self_test.child:scratch"
    """`module:function` of a folder; a context manager that yields what the checks get."""
    limit_s: float = 120.0
    """Of imports and set-up."""
    avoid: str = "see the message"
    """What does without the set-up, where that fails and its own message does not say."""
