"""A check for labels that no response can match, before any response is compared with them."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path

from pebble import ProcessFuture, ProcessPool

from vlmrl.config.built_in import REWARD_FUNCTIONS
from vlmrl.config.reward import Scoring
from vlmrl.rewards import exact, function_worker
from vlmrl.rewards.batch import LABELS, TRL_ONLY
from vlmrl.rewards.pool import PATIENCE_S, START_LIMIT_S, Trouble, end_pool, outcome, start_pool, stop_forkserver
from vlmrl.rewards.spelling import needs_no_parser

_TIME_LIMIT_S = 5.0
"""Time limit per label. math-verify stops itself sooner, unless it is inside one long multiplication."""
_MAX_TRIES = 2
_MAX_KEPT = 65_536
_NEED_LABELS = frozenset(name for name, row in REWARD_FUNCTIONS.items() if row.needs_label)


def built_in_that_need_labels(reward: Scoring) -> list[str]:
    """Return the built-in functions of the run that compare responses with a label."""
    return [name for name in reward.functions if name in _NEED_LABELS]


def functions_that_need_labels(reward: Scoring) -> str | None:
    """Return the reward functions that need a label, for messages; None if none does.

    A user's function needs one if its parameter `label` has no default; a function with TRL's signature, if a parameter
    with a usual name of the label (`answer`) has none. Its file is parsed, not run.
    """
    names = built_in_that_need_labels(reward)
    needing = [f"reward.functions {' and '.join(names)}"] * bool(names)
    if demanded := _demanded_labels(reward):
        parameters = f"parameter {demanded[0]}" if len(demanded) == 1 else f"parameters {' and '.join(demanded)}"
        needing.append(f"reward.remote_url {reward.user_function} (its {parameters} has no default)")
    return " and ".join(needing) or None


def label_substitutes(reward: Scoring) -> frozenset[str]:
    """Columns that replace the label of the only function that needs one: a dataset with them needs no label."""
    demanded = frozenset(_demanded_labels(reward))
    is_only_one = not any(name in _NEED_LABELS for name in reward.functions)
    return demanded if is_only_one and _is_of_trl(reward) else frozenset()


def other_columns(reward: Scoring) -> frozenset[str]:
    """Columns that a function with TRL's signature requires of every row, besides prompts, completions and the label.
    Arguments that no row can have are rejected when the function is loaded."""
    not_columns = {"prompts", "completions", "images"} | TRL_ONLY | LABELS
    return frozenset(_demanded(reward)) - not_columns if _is_of_trl(reward) else frozenset()


def _is_of_trl(reward: Scoring) -> bool:
    arguments = _arguments_of(reward)
    if arguments is None:
        return False
    return any(argument.arg == "completions" for argument in (*arguments.args, *arguments.kwonlyargs))


def _demanded_labels(reward: Scoring) -> list[str]:
    """Return the parameters of the user's function, without a default, that are the label."""
    labels = LABELS if _is_of_trl(reward) else {"label"}
    return [name for name in _demanded(reward) if name in labels]


def _demanded(reward: Scoring) -> list[str]:
    """Return the parameters of the user's function that have no default."""
    arguments = _arguments_of(reward)
    if arguments is None:
        return []
    positional = [*arguments.posonlyargs, *arguments.args]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    demanded = [
        *positional[: len(positional) - len(arguments.defaults)],
        *(argument for argument, default in named if default is None),
    ]
    return [argument.arg for argument in demanded]


def _arguments_of(reward: Scoring) -> ast.arguments | None:
    """Return the parameters of the user's function, read from its file."""
    if reward.user_function is None:
        return None
    file, _, name = reward.user_function.rpartition(":")
    try:
        tree = ast.parse(Path(file).expanduser().read_bytes())
    except (OSError, SyntaxError, ValueError, RuntimeError):
        return None  # loading the function reports the problem of the file
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    signatures = [node.args for node in tree.body if isinstance(node, kinds) and node.name == name]
    return signatures[-1] if signatures else None


class LabelCheck:
    """Finds labels that the reward functions `names` cannot use. `close` ends the process that it started.

    Labels that need a parser go to a process, which starts with the first of them: a parse that hangs is stopped and
    tried once more, and then the label counts as unusable.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._pool: ProcessPool | None = None
        self._known: dict[str, str | None] = {}

    def __call__(self, labels: Sequence[str], *, limit_s: float | None = None) -> list[str | None]:
        """Why each label cannot be used; None if it can, or if that is not known after `limit_s`."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        if len(self._known) > _MAX_KEPT:
            self._known.clear()
        unknown = [label for label in dict.fromkeys(labels) if label not in self._known]
        hard = [label for label in unknown if not self._settle(label)]
        for _ in range(_MAX_TRIES):
            hard = self._parse(hard, deadline)
        return [self._known.get(label) for label in labels]

    def close(self) -> None:
        """End the process, if there is one. Idempotent."""
        if self._pool is not None:
            end_pool(self._pool)
            self._pool = None
            stop_forkserver()

    def _settle(self, label: str) -> bool:
        """Record whether the label can be used, if no parser is needed to know. Return False if one is."""
        problem = exact.unusable(label) if self._names.intersection(_NEED_LABELS) else None
        if problem is None and "math" in self._names and not needs_no_parser(label):
            return False
        self._known[label] = problem
        return True

    def _parse(self, labels: Sequence[str], deadline: float | None) -> list[str]:
        """Parse each label with math-verify. Return those whose parse hung or ended its process."""
        if not labels:
            return []
        if self._pool is None or not self._pool.active:
            self.close()
            self._pool = start_pool(("math",), None, num_workers=1)
        scheduled = [
            (label, self._pool.schedule(function_worker.unusable, args=("math", label), timeout=_TIME_LIMIT_S))
            for label in labels
        ]
        failed = []
        for label, future in scheduled:
            if not self._is_done(future, deadline):
                future.cancel()  # type: ignore[no-untyped-call]
                continue
            problem: str | Trouble | None = outcome(future, "math", _TIME_LIMIT_S)
            if isinstance(problem, Trouble):
                failed.append(label)
                problem = "it takes too long to parse"
            self._known[label] = problem
        return failed

    def _is_done(self, future: ProcessFuture[str | None], deadline: float | None) -> bool:
        """Wait for the call. Return False at the deadline, or if the pool broke."""
        latest = time.monotonic() + START_LIMIT_S + PATIENCE_S
        while not future.done():
            left = min(latest, deadline or latest) - time.monotonic()
            if left <= 0 or self._pool is None or not self._pool.active:
                return False
            wait([future], timeout=min(1.0, left))
        return True
