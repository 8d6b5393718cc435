"""Scores answers with one or several reward functions, in processes of their own, which a hanging function cannot hang.

A user's reward function lives in any Python file and is named by `reward.remote_url`, as `path/to/file.py:function`:

    def my_reward(response, label):
        return float(label in response)

It is called once per answer with keyword arguments, of which it gets those that it declares: `prompt` (the rendered
text), `response`, `label` (None when the row has none), `images` (PIL, as the model saw them) and `metadata` (the row's
other columns). It returns one number, or a dict of numbers with one named `total`, the others being for the metrics. It
is never called with a batch, and a list is not an answer. What it may hold on to (a model, a connection) is loaded at
the top of the file: that happens once per process and outside the time limit.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards import worker
from vlmrl.rewards.worker import SETTING, Declared, Verdict
from vlmrl.types import Group, Prompt, Score

if TYPE_CHECKING:
    from vlmrl.config.reward import Scoring

_START_LIMIT_S = 120.0
"""For importing the user's file, with whatever it loads."""
_PATIENCE_S = 30.0
"""For killing a process that holds on and starting the next, beyond all limits, before the pool counts as stuck."""
_MOST_RESTARTS = 3


class _Call(NamedTuple):
    """One function for one answer."""

    function: str
    source: str
    arguments: Mapping[str, Any]
    images: tuple[str, ...]


class Rewarder:
    """The reward of a run. Starts its processes when made, and checks the functions there; `close` ends them."""

    def __init__(self, reward: Scoring) -> None:
        """Raises ConfigError when the user's function cannot be loaded or wants arguments that do not exist."""
        self._reward = reward
        self._user = None if reward.remote_url is None else reward.remote_url.rpartition(":")[2]
        self._weights = _weights(reward, self._user)
        self._pool = self._start_pool()
        try:
            self._declared = {name: self._describe(name) for name in self._weights}
        except BaseException:
            self.close()
            raise

    def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        """One score per answer, group by group. Blocks: call it where nothing waits.

        An answer whose function raises, runs past `reward.time_limit_s` or returns something else than a finite number
        is a failed score of 0. The built-in functions are ours, so one that runs too long has met a hostile answer,
        and that is worth 0 without being a failure.

        Raises RewardError when a prompt has no label and a function needs one, and when more than
        `reward.max_failed_fraction` of the answers failed.
        """
        self._check_labels(groups)
        with tempfile.TemporaryDirectory(prefix="vlmrl-rewards-") as folder:
            calls = list(self._calls(groups, Path(folder)))
            verdicts = self._verdicts(calls, num_answers=sum(len(group.rollouts) for group in groups))
        one_answer = iter(zip(*[iter(verdicts)] * len(self._weights), strict=True))
        return [[self._combine(next(one_answer)) for _ in group.rollouts] for group in groups]

    def close(self) -> None:
        """Ends every process that scoring started. Idempotent."""
        self._end_pool()
        _stop_forkserver()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start_pool(self) -> ProcessPool:
        # Forking this process would copy locks that its threads hold (Ray, gRPC, vLLM). The fork server is a clean
        # process with math-verify already imported, so that a worker that had to be killed is replaced in milliseconds.
        context = multiprocessing.get_context("forkserver")
        built_in = tuple(name for name in self._weights if name != self._user)
        context.set_forkserver_preload(["vlmrl.rewards.worker", *(f"vlmrl.rewards.{name}" for name in built_in)])
        return ProcessPool(
            max_workers=self._reward.num_workers,
            context=context,
            initializer=worker.start,
            initargs=(built_in, self._reward.remote_url),
        )

    def _end_pool(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def _describe(self, name: str) -> Declared:
        future = self._pool.schedule(worker.describe, args=(name,))
        try:
            declared: Declared = future.result(timeout=_START_LIMIT_S)
        except TimeoutError as error:
            raise ConfigError(
                f"{SETTING}: {self._reward.remote_url} takes over {_START_LIMIT_S:g} s to import"
            ) from error
        except (BrokenProcessPool, ProcessExpired, RuntimeError) as error:
            raise ConfigError(f"{SETTING}: {self._reward.remote_url} ends its process when it is imported") from error
        return declared

    def _check_labels(self, groups: Sequence[Group]) -> None:
        wanting = [name for name, declared in self._declared.items() if declared.wants_label]
        for group in groups:
            if wanting and group.prompt.label is None:
                raise RewardError(
                    f"{group.prompt.source} has no label, and the reward function {wanting[0]} compares with one: set "
                    "data.label_key to the column that holds it, or choose other reward.functions"
                )

    def _calls(self, groups: Sequence[Group], folder: Path) -> Iterator[_Call]:
        """Answer by answer, and for each the functions in order."""
        wants_images = any("images" in declared.arguments for declared in self._declared.values())
        for group in groups:
            # A file per image, not a copy per answer: what crosses processes does not depend on G.
            images = _write_images(group.prompt, folder) if wants_images else ()
            for rollout in group.rollouts:
                known = {
                    "prompt": group.prompt.text,
                    "response": rollout.text,
                    "label": group.prompt.label,
                    "metadata": dict(group.prompt.metadata),
                }
                for name, declared in self._declared.items():
                    arguments = {key: value for key, value in known.items() if key in declared.arguments}
                    yield _Call(name, group.prompt.source, arguments, images if "images" in declared.arguments else ())

    def _verdicts(self, calls: Sequence[_Call], *, num_answers: int) -> list[Verdict]:
        """One per call, in order. Raises as soon as too many answers have failed, not after waiting for the others."""
        done: dict[int, Verdict] = {}
        failures: dict[int, str] = {}  # answer -> its first reason
        for _ in range(_MOST_RESTARTS):
            if not self._pool.active:  # a process may also die while there is nothing to score
                self._end_pool()
                self._pool = self._start_pool()
            futures = self._schedule({i: call for i, call in enumerate(calls) if i not in done})
            try:
                for i, future in futures.items():
                    verdict = self._await(calls[i], future)
                    if verdict is None:
                        continue
                    done[i] = verdict
                    if verdict.problem is not None:
                        failures.setdefault(i // len(self._weights), f"{verdict.problem}, on {calls[i].source}")
                        self._check_failures(failures, num_answers)
            except BaseException:
                for future in futures.values():
                    future.cancel()  # type: ignore[no-untyped-call]
                raise
            if len(done) == len(calls):
                return [done[i] for i in range(len(calls))]
        raise RewardError("the processes that score answers keep dying: is there memory left? lower reward.num_workers")

    def _schedule(self, calls: Mapping[int, _Call]) -> dict[int, ProcessFuture[Verdict]]:
        """A call of its own for each answer: that costs 0.1 ms, and one that hangs takes no other with it."""
        futures: dict[int, ProcessFuture[Verdict]] = {}
        with suppress(RuntimeError):  # the pool broke just now: what is missing comes again
            for i, call in calls.items():
                arguments = (call.function, call.arguments, call.images)
                futures[i] = self._pool.schedule(worker.call, args=arguments, timeout=self._reward.time_limit_s)
        return futures

    def _await(self, call: _Call, future: ProcessFuture[Verdict]) -> Verdict | None:
        """None when the pool broke before the call was made."""
        deadline = time.monotonic() + self._reward.time_limit_s + _START_LIMIT_S + _PATIENCE_S
        # pebble forgets what stood in its queue when it broke, so that nobody would ever answer.
        while not wait([future], timeout=1.0).done and self._pool.active:
            if time.monotonic() > deadline:
                raise RewardError(
                    f"the processes that score answers are stuck in front of {call.function}; if it is yours, does "
                    "importing its file always end?"
                )
        try:
            verdict: Verdict = future.result(timeout=0)
            return verdict
        except TimeoutError:
            if not future.done():
                return None
            problem = f"{call.function} took longer than reward.time_limit_s {self._reward.time_limit_s:g}"
        except ProcessExpired as error:
            problem = f"{call.function} ended its process (exit code {error.exitcode})"
        except (BrokenProcessPool, CancelledError):
            return None
        return Verdict() if call.function != self._user else Verdict(problem=problem)

    def _check_failures(self, failures: Mapping[int, str], num_answers: int) -> None:
        if len(failures) > self._reward.max_failed_fraction * num_answers:
            raise RewardError(
                f"{len(failures)} of {num_answers} answers could not be scored, more than reward.max_failed_fraction "
                f"{self._reward.max_failed_fraction:g}; the first: {next(iter(failures.values()))}"
            )

    def _combine(self, verdicts: Sequence[Verdict]) -> Score:
        parts: dict[str, float] = {}
        for name, verdict in zip(self._weights, verdicts, strict=True):
            if verdict.problem is None:
                key = re.sub(r"\W", "_", name, flags=re.ASCII)
                parts |= {key: verdict.value} | {f"{key}/{part}": value for part, value in verdict.parts.items()}
        if any(verdict.problem is not None for verdict in verdicts):
            return Score(total=0.0, parts=parts, failed=True)
        total = sum(weight * v.value for weight, v in zip(self._weights.values(), verdicts, strict=True))
        return Score(total=total, parts=parts)


def check_functions(reward: Scoring) -> None:
    """Load the reward functions as a run would, and leave nothing behind. Raises ConfigError as `Rewarder` does."""
    Rewarder(reward).close()


def _weights(reward: Scoring, user: str | None) -> dict[str, float]:
    """Name -> weight, the user's function last."""
    if user in reward.functions:
        raise ConfigError(f"{SETTING}: your function is called {user}, as one in reward.functions is: rename yours")
    return dict(reward.functions) | ({} if user is None else {user: reward.remote_weight})


def _write_images(prompt: Prompt, folder: Path) -> tuple[str, ...]:
    """A .npy file per image; each picture once, however many prompts hold it."""
    files = []
    for media in prompt.media:
        file = folder / f"{media.hash}.npy"
        if not file.exists():
            np.save(file, media.fetch(), allow_pickle=False)
        files.append(os.fspath(file))
    return tuple(files)


def _stop_forkserver() -> None:
    """End the fork server, unless another part of the process still has children of it.

    The standard library ends it only with the process itself, and has no public way to do it earlier.
    """
    if not multiprocessing.active_children():
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
