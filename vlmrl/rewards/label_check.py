"""Finds labels that no response can match, before any response is compared with them."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path

from pebble import ProcessFuture, ProcessPool

from vlmrl.config.reward import Scoring
from vlmrl.rewards import exact, worker
from vlmrl.rewards.plain import needs_no_parser
from vlmrl.rewards.pool import PATIENCE_S, START_LIMIT_S, Trouble, end_pool, outcome, start_pool, stop_forkserver

_TIME_LIMIT_S = 5.0
"""For one label. math-verify stops itself sooner, unless it is inside one long multiplication."""
_MOST_TRIES = 2
_MOST_KEPT = 65_536
_WANT_LABELS = ("exact", "math")
"""The built-in functions whose `WANTS_LABEL` is set."""


def who_needs_labels(reward: Scoring) -> str | None:
    """Which reward functions compare with a label, for messages; None: none of them does.

    A function of the user's does when its parameter `label` has no default. Nothing of its file is run.
    """
    names = [name for name in reward.functions if name in _WANT_LABELS]
    needing = [f"reward.functions {' and '.join(names)}"] * bool(names)
    if reward.user_function is not None and _demands_label(*reward.user_function.rpartition(":")[::2]):
        needing.append(f"reward.remote_url {reward.user_function} (its parameter label has no default)")
    return " and ".join(needing) or None


def _demands_label(file: str, name: str) -> bool:
    try:
        tree = ast.parse(Path(file).expanduser().read_bytes())
    except (OSError, SyntaxError, ValueError, RuntimeError):
        return False  # whoever loads the function says what is wrong with the file
    found = [node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        return False
    positional = [*found[-1].posonlyargs, *found[-1].args]
    named = zip(found[-1].kwonlyargs, found[-1].kw_defaults, strict=True)
    demanded = [
        *positional[: len(positional) - len(found[-1].defaults)],
        *(argument for argument, default in named if default is None),
    ]
    return any(argument.arg == "label" for argument in demanded)


class LabelCheck:
    """Says why labels cannot be used by the reward functions `names`. `close` ends the process that it started.

    Only what needs a parser goes to a process, which is started when the first such label comes: a parse that hangs is
    ended there, tried once more, and then the label's fault.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._pool: ProcessPool | None = None
        self._known: dict[str, str | None] = {}

    def __call__(self, labels: Sequence[str], *, limit_s: float | None = None) -> list[str | None]:
        """Why each label cannot be used; None where it can, and where that was not known after `limit_s`."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        if len(self._known) > _MOST_KEPT:
            self._known.clear()
        unknown = [label for label in dict.fromkeys(labels) if label not in self._known]
        hard = [label for label in unknown if not self._settle(label)]
        for _ in range(_MOST_TRIES):
            hard = self._parse(hard, deadline)
        return [self._known.get(label) for label in labels]

    def close(self) -> None:
        """Idempotent."""
        if self._pool is not None:
            end_pool(self._pool)
            self._pool = None
            stop_forkserver()

    def _settle(self, label: str) -> bool:
        """Whether it is known without a parser."""
        problem = exact.unusable(label) if self._names.intersection(_WANT_LABELS) else None
        if problem is None and "math" in self._names and not needs_no_parser(label):
            return False
        self._known[label] = problem
        return True

    def _parse(self, labels: Sequence[str], deadline: float | None) -> list[str]:
        """Asks math-verify about each; the labels whose parse went wrong."""
        if not labels:
            return []
        if self._pool is None or not self._pool.active:
            self.close()
            self._pool = start_pool(("math",), None, num_workers=1)
        asked = [
            (label, self._pool.schedule(worker.unusable, args=("math", label), timeout=_TIME_LIMIT_S))
            for label in labels
        ]
        wrong = []
        for label, future in asked:
            if not self._is_done(future, deadline):
                future.cancel()  # type: ignore[no-untyped-call]
                continue
            found: str | Trouble | None = outcome(future, "math", _TIME_LIMIT_S)
            if isinstance(found, Trouble):
                wrong.append(label)
                found = "it takes too long to parse"
            self._known[label] = found
        return wrong

    def _is_done(self, future: ProcessFuture[str | None], deadline: float | None) -> bool:
        """False at the deadline, and when the process is gone for good."""
        latest = time.monotonic() + START_LIMIT_S + PATIENCE_S
        while not future.done():
            left = min(latest, deadline or latest) - time.monotonic()
            if left <= 0 or self._pool is None or not self._pool.active:
                return False
            wait([future], timeout=min(1.0, left))
        return True
