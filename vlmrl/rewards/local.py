"""Calls reward functions in processes of their own, which a hanging function cannot hang.

A user's reward function lives in any Python file and is named by `reward.remote_url`, as `path/to/file.py:function`:

    def my_reward(response, label):
        return float(label in response)

It is called once per answer with keyword arguments, of which it gets those that it declares: `prompt` (the rendered
text), `response`, `label` (None when the row has none), `images` (PIL, as the model saw them) and `metadata` (the row's
other columns). It returns one number, or a dict of numbers with one named `total`, the others being for the metrics; a
list is not an answer. Functions with the signatures of TRL and OpenRLHF get a batch (`batch.py`).

An error of the network or the operating system that it raises, TimeoutError included, is the infrastructure's doing,
and leaves the answer without a reward; any other is the answer's own, and so is a server's refusal of what it was sent
(status 400, 413, 422), and a call that twice runs too long or ends its process. What it may hold on to (a model, a
connection) is loaded at the top of the file: that happens once per process and outside the time limit.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards import local_worker as worker
from vlmrl.rewards.batch import Signature
from vlmrl.rewards.environment import check_passed
from vlmrl.rewards.local_worker import SETTING, Declared, Verdict
from vlmrl.rewards.pool import PATIENCE_S, START_LIMIT_S, Trouble, end_pool, outcome, start_pool, stop_forkserver
from vlmrl.rewards.question import Question

_MOST_RESTARTS = 3
_MOST_IN_VAIN = 16
"""Second tries in a row that went no better than the first, after which it is not the machine: no more are made. Of a
function that has not returned even once, one is enough."""


class _Call(NamedTuple):
    """One function for one answer, or for a batch of them."""

    answers: tuple[int, ...]
    function: str
    arguments: tuple[Mapping[str, Any], ...]
    """Of each answer."""
    images: tuple[tuple[str, ...], ...]

    def alone(self) -> list[_Call]:
        """The same for each of its answers."""
        parts = zip(self.answers, self.arguments, self.images, strict=True)
        return [_Call((answer,), self.function, (given,), (files,)) for answer, given, files in parts]


class Calls:
    """The calls for some answers, under way or done. Made by `Functions.begin`, read by `Functions.collect`."""

    def __init__(self, calls: Sequence[_Call], folder: tempfile.TemporaryDirectory[str] | None) -> None:
        """`folder` holds the images while the calls need them."""
        self.all = calls
        self.folder = folder
        self.futures: dict[int, tuple[ProcessFuture[tuple[Verdict, ...]], ProcessPool]] = {}
        """Number of a call -> where its verdicts will be, and the pool that was asked."""

    def end(self) -> None:
        """Nobody waits for them any more."""
        for future, _ in self.futures.values():
            future.cancel()  # type: ignore[no-untyped-call]
        if self.folder is not None:
            self.folder.cleanup()


class Functions:
    """The built-in reward functions `names`, and the user's own. `close` ends the processes that they run in.

    Args:
        own: the user's function, `path/to/file.py:function`.
        time_limit_s: for one answer.
        pass_env: environment variables with secrets that the functions see.
        log: where what they print goes; None: where this process prints.
        label_key: the column of the label, by which a function may ask for it, beside that of the row's own dataset.
    """

    def __init__(
        self,
        names: Sequence[str],
        own: str | None,
        *,
        num_workers: int,
        time_limit_s: float,
        pass_env: tuple[str, ...] = (),
        log: Path | None = None,
        label_key: str = "label",
    ) -> None:
        """Raises ConfigError when the user's function cannot be loaded or wants arguments that do not exist, and when
        a variable of `pass_env` is not there."""
        check_passed(pass_env)
        self._pass_env = pass_env
        self._built_in = tuple(names)
        self._spec = own
        self._own = None if own is None else own.rpartition(":")[2]
        if self._own in names:
            raise ConfigError(
                f"{SETTING}: your function is called {self._own}, as one in reward.functions is: rename yours"
            )
        self._num_workers = num_workers
        self._time_limit_s = time_limit_s
        self._log, self._label_key = log, label_key
        self._longest_s = time_limit_s
        """What a call may take at most: a batch has the time of all its answers."""
        self._last_end = 0.0
        self._is_closed = False
        self._alone: ProcessPool | None = None
        self._in_vain = 0
        self._have_returned: set[str] = set()
        """The functions that came to an end by themselves, for at least one answer."""
        self._pool = self._start_pool(self._num_workers)
        try:
            self._declared = {name: self._describe(name) for name in self.names}
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Every function, the user's last."""
        return self._built_in if self._own is None else (*self._built_in, self._own)

    @property
    def wants_images(self) -> bool:
        return any("images" in declared.arguments for declared in self._declared.values())

    def missing(self, question: Question) -> str | None:
        """What keeps this answer from being scored, in one line that starts with its row."""
        for name, declared in self._declared.items():
            column = None if declared.batch is None else self._missing_column(declared.batch, question)
            if column is not None:
                has = ", ".join(["label", *question.metadata])
                return (
                    f"{question.source} has no column {column}, for which {name} asks (it has {has}; the question goes "
                    "by prompts)"
                )
        wanting = [name for name, declared in self._declared.items() if declared.wants_label]
        if not wanting or question.label is not None:
            return None
        return f"{question.source} has no label, and the reward function {wanting[0]} compares with one"

    def _missing_column(self, signature: Signature, question: Question) -> str | None:
        return signature.missing(label_keys=self._label_keys(question), metadata=question.metadata)

    def _label_keys(self, question: Question) -> tuple[str, ...]:
        return (self._label_key,) if question.label_key is None else (self._label_key, question.label_key)

    def begin(self, questions: Sequence[Question]) -> Calls:
        """Hand the calls to the processes, and return before they are made."""
        folder = None
        if self.wants_images and any(question.media for question in questions):
            folder = tempfile.TemporaryDirectory(prefix="vlmrl-rewards-")
        calls = Calls(list(self._calls(questions, folder)), folder)
        self._schedule(calls)
        return calls

    def collect(self, begun: Sequence[Calls]) -> Generator[tuple[int, int, str, Verdict], None, None]:
        """(number of the `begin`, number of the answer in it, function, verdict), each as soon as it is there.

        A call that ran too long or ended its process is made once more, alone in a fresh process; if that is no
        better, it is the response's doing, and so it is after many such calls in a row, which take too long to be made
        again one by one. Calls that were still waiting when their pool broke are made again. A reader
        who has seen enough closes the iterator, which takes back what is still waiting. Raises RewardError when
        processes keep dying.
        """
        self._in_vain = 0
        left = {(i, j) for i, calls in enumerate(begun) for j in range(len(calls.all))}
        try:
            for _ in range(_MOST_RESTARTS):
                self._revive()
                for calls in begun:
                    self._schedule(calls)
                for i, j in sorted(left):
                    verdicts = self._await(begun[i], j)
                    if verdicts is not None:
                        left.remove((i, j))
                        call = begun[i].all[j]
                        for answer, verdict in zip(call.answers, verdicts, strict=True):
                            yield i, answer, call.function, verdict
                if not left:
                    return
        finally:
            for calls in begun:
                calls.end()
            self._end_alone()
        raise RewardError("the processes that score answers keep dying: is there memory left? lower reward.num_workers")

    def close(self) -> None:
        """Ends every process that scoring started; who waits for verdicts is told so. Idempotent."""
        self._is_closed = True
        end_pool(self._pool)
        self._end_alone()
        stop_forkserver()

    def _start_pool(self, num_workers: int, *, max_tasks: int = 0) -> ProcessPool:
        return start_pool(
            self._built_in,
            self._spec,
            num_workers=num_workers,
            max_tasks=max_tasks,
            pass_env=self._pass_env,
            log=self._log,
        )

    def _end_alone(self) -> None:
        if self._alone is not None:
            end_pool(self._alone)
            self._alone = None

    def _revive(self) -> None:
        self._check_open()
        if not self._pool.active:  # a process may also die while there is nothing to score
            end_pool(self._pool)
            self._pool = self._start_pool(self._num_workers)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RewardError("the processes that score answers were stopped while answers waited")

    def _describe(self, name: str) -> Declared:
        deadline = time.monotonic() + START_LIMIT_S
        try:
            future = self._pool.schedule(worker.describe, args=(name,))
            # Here and below: pebble forgets what stood in its queue when it broke, so that nobody would ever answer.
            while not wait([future], timeout=1.0).done and self._pool.active:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{SETTING}: {self._spec} takes over {START_LIMIT_S:g} s to import")
            declared: Declared = future.result(timeout=0)
            return declared
        except (TimeoutError, BrokenProcessPool, ProcessExpired, RuntimeError) as error:
            raise ConfigError(f"{SETTING}: {self._spec} ends its process when it is imported") from error

    def _calls(self, questions: Sequence[Question], folder: tempfile.TemporaryDirectory[str] | None) -> Iterator[_Call]:
        """Answer by answer, and for each the functions in order; those that take a batch come last."""
        batches: dict[str, list[_Call]] = {name: [] for name, declared in self._declared.items() if declared.batch}
        for answer, question in enumerate(questions):
            # A file per image, not a copy per answer: what crosses processes does not depend on G.
            images = () if folder is None else _write_images(question, Path(folder.name))
            known = {
                "prompt": question.prompt,
                "response": question.response,
                "label": question.label,
                "metadata": dict(question.metadata),
            }
            for name, declared in self._declared.items():
                files = images if "images" in declared.arguments else ()
                if declared.batch is not None:
                    item = known | {"label_keys": self._label_keys(question), "is_chat": question.is_chat}
                    batches[name].append(_Call((answer,), name, (item,), (files,)))
                    continue
                arguments = {key: value for key, value in known.items() if key in declared.arguments}
                yield _Call((answer,), name, (arguments,), (files,))
        for name, single in batches.items():
            if single:
                answers = tuple(call.answers[0] for call in single)
                given = tuple(call.arguments[0] for call in single)
                yield _Call(answers, name, given, tuple(call.images[0] for call in single))

    def _schedule(self, calls: Calls) -> None:
        """Those not under way, a task for each: that costs 0.1 ms, and one that hangs takes no other along."""
        with suppress(RuntimeError):  # the pool broke just now: what is missing comes again
            for i, call in enumerate(calls.all):
                if i not in calls.futures:
                    arguments = (call.function, call.arguments, call.images)
                    limit_s = self._time_limit_s * len(call.answers)
                    self._longest_s = max(self._longest_s, limit_s)
                    future = self._pool.schedule(worker.call_all, args=arguments, timeout=limit_s)
                    future.add_done_callback(partial(self._note_end, call.function))
                    calls.futures[i] = (future, self._pool)

    def _note_end(self, function: str, future: Any) -> None:
        self._last_end = time.monotonic()
        if not future.cancelled() and future.exception() is None:
            self._have_returned.add(function)

    def _await(self, calls: Calls, number: int) -> Iterable[Verdict] | None:
        """One verdict per answer; a second try is made when its verdict is asked for. None when the pool broke before
        the call was made: then it is no longer under way."""
        self._check_open()
        if number not in calls.futures:
            return None
        call, (future, pool) = calls.all[number], calls.futures[number]
        self._wait(future, pool, call.function)
        found: tuple[Verdict, ...] | Trouble | None = outcome(future, call.function, self._time_limit_s)
        if found is None:
            del calls.futures[number]
        if isinstance(found, Trouble):
            return (self._once_more(one, found) for one in call.alone())
        return found

    def _once_more(self, call: _Call, trouble: Trouble) -> Verdict:
        """The verdict of a second try for one answer: the machine may have stood still, or other calls have taken its
        memory."""
        never = call.function not in self._have_returned
        if self._in_vain >= (1 if never else _MOST_IN_VAIN):
            return Verdict(problem=trouble.problem, never_returned=never)
        if self._alone is None or not self._alone.active:
            self._end_alone()
            self._alone = self._start_pool(1, max_tasks=1)
        arguments = (call.function, call.arguments, call.images)
        future = self._alone.schedule(worker.call_all, args=arguments, timeout=self._time_limit_s)
        future.add_done_callback(partial(self._note_end, call.function))
        self._wait(future, self._alone, call.function)
        found: tuple[Verdict, ...] | Trouble | None = outcome(future, call.function, self._time_limit_s)
        self._in_vain = self._in_vain + 1 if isinstance(found, Trouble) else 0
        if isinstance(found, tuple) and not isinstance(found, Trouble):
            return replace(found[0], retried=trouble.kind)
        if found is None:
            problem = f"{trouble.problem}, and no process could be started to try again"
            return Verdict(problem=problem, blame="infrastructure", retried=trouble.kind)
        problem = f"{found.problem}, also when tried again alone"
        return Verdict(problem=problem, retried=trouble.kind, never_returned=never)

    def _wait(self, future: ProcessFuture[tuple[Verdict, ...]], pool: ProcessPool, function: str) -> None:
        """Until the call is done or its pool broke."""
        start = time.monotonic()
        while not wait([future], timeout=1.0).done and pool.active:
            # Calls of other groups may stand before this one, for as long as they take.
            if time.monotonic() - max(start, self._last_end) > self._longest_s + START_LIMIT_S + PATIENCE_S:
                raise RewardError(
                    f"the processes that score answers are stuck in front of {function}; if it is yours, does "
                    "importing its file always end?"
                )


def _write_images(question: Question, folder: Path) -> tuple[str, ...]:
    """A .npy file per image; each picture once, however many answers it has."""
    files = []
    for media in question.media:
        file = folder / f"{media.hash}.npy"
        if not file.exists():
            np.save(file, media.fetch(), allow_pickle=False)
        files.append(os.fspath(file))
    return tuple(files)
