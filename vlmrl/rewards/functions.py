"""Reward functions in separate processes, so that a hanging function cannot hang the run.

A user's reward function is in any Python file; `reward.remote_url` names it as `path/to/file.py:function`:

    def my_reward(response, label):
        return float(label in response)

It is called once per response with the keyword arguments that it declares among these: `prompt` (the rendered text),
`response` (the last one of a conversation), `messages` (prompt and responses in the chat format, with their images if
the function also declares `images`), `label` (None when the row has none), `images` (those of the prompt, PIL, as the
model saw them) and `metadata` (the row's other columns). It returns one number, or a dict of numbers with one named
`total` and others for the metrics. Functions with the signatures of TRL and OpenRLHF get a batch (`batch.py`).

A network or operating system error that it raises, TimeoutError included, counts as a failure of the infrastructure and
leaves the response without a reward. Any other error counts as the response's, and so does a server's refusal of its
content (status 400, 413, 422) and a call that twice runs too long or ends its process. Load models and connections at
the top of the file, which runs once per process and outside the time limit.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pebble import ProcessPool

from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards import function_worker
from vlmrl.rewards.batch import Signature
from vlmrl.rewards.function_worker import SETTING, Declared, RewardResult
from vlmrl.rewards.image_files import write_images
from vlmrl.rewards.messages import to_plain
from vlmrl.rewards.pool import PATIENCE_S, START_LIMIT_S, Trouble, end_pool, outcome, start_pool, stop_forkserver
from vlmrl.rewards.protocol import RewardRequest
from vlmrl.system.environment_variables import check_passed
from vlmrl.types import Media

_MAX_RESTARTS = 3
_MAX_FAILED_RETRIES = 16
"""Failed second tries in a row, after which the machine is not the cause and no more are made. For a function that has
never returned, one is enough."""


class _Call(NamedTuple):
    """One function for one response, or for a batch of them."""

    responses: tuple[int, ...]
    function: str
    arguments: tuple[Mapping[str, Any], ...]
    """The arguments of each response."""
    images: tuple[tuple[str, ...], ...]

    def singles(self) -> list[_Call]:
        """Split into one call per response."""
        parts = zip(self.responses, self.arguments, self.images, strict=True)
        return [_Call((response,), self.function, (given,), (files,)) for response, given, files in parts]


class Calls:
    """The calls for some responses, pending or done. Made by `Functions.begin`, read by `Functions.collect`."""

    def __init__(self, calls: Sequence[_Call], folder: tempfile.TemporaryDirectory[str] | None) -> None:
        """`folder` holds the images while the calls need them."""
        self.all = calls
        self.folder = folder
        self.futures: dict[int, tuple[asyncio.Future[tuple[RewardResult, ...]], ProcessPool]] = {}
        """Index of a call -> future of its results, and the pool that makes it."""

    def end(self) -> None:
        """Cancel the pending calls, and remove the images."""
        for future, _ in self.futures.values():
            future.cancel()
        if self.folder is not None:
            self.folder.cleanup()


class Functions:
    """The built-in reward functions `names` and the user's function. `start` starts their processes, `close` ends them.

    Args:
        user_function: `path/to/file.py:function`.
        time_limit_s: time limit per response.
        pass_env: environment variables with secrets that the functions see.
        log: file for the functions' output; None: the output of this process.
        label_key: the label's column, by which a function may declare the label, in addition to that of the row's
        dataset.
    """

    def __init__(
        self,
        names: Sequence[str],
        user_function: str | None,
        *,
        num_workers: int,
        time_limit_s: float,
        pass_env: tuple[str, ...] = (),
        log: Path | None = None,
        label_key: str = "label",
    ) -> None:
        """Raises ConfigError if a variable of `pass_env` does not exist, and if two functions have the same name."""
        check_passed(pass_env, setting="reward.pass_env")
        self._pass_env = pass_env
        self._built_in = tuple(names)
        self._spec = user_function
        self._user_name = None if user_function is None else user_function.rpartition(":")[2]
        if self._user_name in names:
            raise ConfigError(
                f"{SETTING}: your function is called {self._user_name}, like one in reward.functions: rename yours"
            )
        self._num_workers = num_workers
        self._time_limit_s = time_limit_s
        self._log, self._label_key = log, label_key
        self._max_s = time_limit_s
        """Time limit of the longest call: that of a batch is the sum over its responses."""
        self._last_end = 0.0
        self._is_closed = False
        self._pool: ProcessPool | None = None
        self._single: ProcessPool | None = None
        """One process, for second tries."""
        self._num_failed_retries = 0
        self._have_returned: set[str] = set()
        """The functions that have returned for at least one response."""
        self._declared: dict[str, Declared] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All functions, the user's last."""
        return self._built_in if self._user_name is None else (*self._built_in, self._user_name)

    @property
    def wants_images(self) -> bool:
        """Whether a function declares the images. Known after `start`."""
        return any("images" in declared.arguments for declared in self._declared.values())

    async def start(self) -> None:
        """Start the processes and load the functions in them.

        Raises ConfigError if the user's function cannot be loaded or requires unknown arguments.
        """
        self._pool = self._start_pool(self._num_workers)
        for name in self.names:
            self._declared[name] = await self._describe(name, self._pool)

    async def close(self) -> None:
        """End all scoring processes; a running `collect` raises RewardError. Idempotent."""
        self._is_closed = True
        pools, self._pool, self._single = (self._pool, self._single), None, None
        for pool in pools:
            if pool is not None:
                await asyncio.to_thread(end_pool, pool)
        stop_forkserver()

    def missing(self, request: RewardRequest) -> str | None:
        """Why this response cannot be scored, in one line that starts with its row; None if it can."""
        for name, declared in self._declared.items():
            column = None if declared.batch is None else self._missing_column(declared.batch, request)
            if column is not None:
                columns = ", ".join(["label", *request.metadata])
                return (
                    f"{request.source} has no column {column}, which {name} requires (it has {columns}; the question "
                    "is passed as prompts)"
                )
        with_label = [name for name, declared in self._declared.items() if declared.needs_label]
        if not with_label or request.label is not None:
            return None
        return f"{request.source} has no label, and the reward function {with_label[0]} compares with one"

    def _missing_column(self, signature: Signature, request: RewardRequest) -> str | None:
        return signature.missing(label_keys=self._label_keys(request), metadata=request.metadata)

    def _label_keys(self, request: RewardRequest) -> tuple[str, ...]:
        return (self._label_key,) if request.label_key is None else (self._label_key, request.label_key)

    async def begin(self, requests: Sequence[RewardRequest]) -> Calls:
        """Send the calls to the processes, and return before they are made."""
        folder = None
        files: dict[str, str] = {}
        if media := {item.hash: item for request in requests for item in self._media(request)}:
            folder = tempfile.TemporaryDirectory(prefix="vlmrl-rewards-")
            files = await asyncio.to_thread(write_images, media.values(), Path(folder.name))
        calls = Calls(list(self._calls(requests, files)), folder)
        self._schedule(calls)
        return calls

    async def collect(self, begun: Sequence[Calls]) -> AsyncGenerator[tuple[int, int, str, RewardResult], None]:
        """(index of the `begin`, index of the response in it, function, result), each as soon as it is available.

        A call that ran too long or ended its process is repeated once, by itself in a new process. If the second try
        fails too, or if too many second tries have failed in a row, it is the response's failure. Calls that still
        waited when their pool broke are made again. A reader that stops early closes the generator, which cancels what
        still waits. Only one `collect` runs at a time: second tries share a process.

        Raises RewardError when processes keep dying.
        """
        self._num_failed_retries = 0
        left = {(i, j) for i, calls in enumerate(begun) for j in range(len(calls.all))}
        try:
            for _ in range(_MAX_RESTARTS):
                await self._revive()
                for calls in begun:
                    self._schedule(calls)
                for i, j in sorted(left):
                    results = await self._results(begun[i], j)
                    if results is None:
                        continue
                    left.remove((i, j))
                    call = begun[i].all[j]
                    if isinstance(results, Trouble):
                        for single in call.singles():
                            yield i, single.responses[0], call.function, await self._retry(single, results)
                        continue
                    for response, result in zip(call.responses, results, strict=True):
                        yield i, response, call.function, result
                if not left:
                    return
        finally:
            for calls in begun:
                calls.end()
            await self._end_single()
        raise RewardError(
            "the processes that score responses keep dying: is there memory left? lower reward.num_workers"
        )

    def _start_pool(self, num_workers: int, *, max_tasks: int = 0) -> ProcessPool:
        return start_pool(
            self._built_in,
            self._spec,
            num_workers=num_workers,
            max_tasks=max_tasks,
            pass_env=self._pass_env,
            log=self._log,
        )

    async def _end_single(self) -> None:
        pool, self._single = self._single, None
        if pool is not None:
            await asyncio.to_thread(end_pool, pool)

    async def _revive(self) -> None:
        pool = self._open_pool()
        if not pool.active:  # a process may also die while there is nothing to score
            await asyncio.to_thread(end_pool, pool)
            self._open_pool()  # raises if `close` came meanwhile
            self._pool = self._start_pool(self._num_workers)

    def _open_pool(self) -> ProcessPool:
        if self._is_closed or self._pool is None:
            raise RewardError("the processes that score responses were stopped while responses waited")
        return self._pool

    async def _describe(self, name: str, pool: ProcessPool) -> Declared:
        deadline = time.monotonic() + START_LIMIT_S
        declared: Declared | Trouble | None = None
        with suppress(RuntimeError):  # the pool broke before
            future: asyncio.Future[Declared] = asyncio.wrap_future(
                pool.schedule(function_worker.describe, args=(name,))
            )
            # Here and below: a broken pool drops its queue, and the future would never complete.
            while not future.done() and pool.active:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{SETTING}: {self._spec} takes over {START_LIMIT_S:g} s to import")
                await asyncio.wait([future], timeout=1.0)
            declared = outcome(future, name, START_LIMIT_S)
        if not isinstance(declared, Declared):
            if name in self._built_in:
                raise RewardError("the processes that score responses end at their start: is there memory left?")
            raise ConfigError(f"{SETTING}: {self._spec} ends its process when it is imported")
        return declared

    def _media(self, request: RewardRequest) -> Sequence[Media]:
        """Return the images that a function reads: those of the prompt, or of the whole conversation."""
        if not self.wants_images:
            return ()
        readers = [declared for declared in self._declared.values() if "images" in declared.arguments]
        reads_messages = any(declared.reads_messages(is_chat=request.is_chat) for declared in readers)
        return request.all_media if reads_messages else request.media

    def _calls(self, requests: Sequence[RewardRequest], files: Mapping[str, str]) -> Iterator[_Call]:
        """Response by response, and for each the functions in order; functions that take a batch come last. `files` are
        those of the images, by hash."""
        batches: dict[str, list[_Call]] = {name: [] for name, declared in self._declared.items() if declared.batch}
        for response, request in enumerate(requests):
            known: dict[str, Any] = {
                "prompt": request.prompt,
                "response": request.response,
                "label": request.label,
                "metadata": dict(request.metadata),
            }
            for name, declared in self._declared.items():
                with_images = "images" in declared.arguments
                images = tuple(files[media.hash] for media in request.media) if with_images else ()
                messages: dict[str, Any] = {}
                if declared.reads_messages(is_chat=request.is_chat):
                    image = (lambda media: files[media.hash]) if with_images else None
                    messages = {"messages": to_plain(request.messages, image)}
                if declared.batch is not None:
                    item = known | messages | self._batch_item(request)
                    batches[name].append(_Call((response,), name, (item,), (images,)))
                    continue
                arguments = {key: value for key, value in known.items() if key in declared.arguments} | messages
                yield _Call((response,), name, (arguments,), (images,))
        for name, singles in batches.items():
            if singles:
                responses = tuple(call.responses[0] for call in singles)
                items = tuple(call.arguments[0] for call in singles)
                yield _Call(responses, name, items, tuple(call.images[0] for call in singles))

    def _batch_item(self, request: RewardRequest) -> dict[str, Any]:
        """Return what only functions that take a batch read, see `batch.arguments`."""
        return {
            "query": request.query,
            "label_keys": self._label_keys(request),
            "num_prompt_messages": request.num_prompt_messages,
        }

    def _schedule(self, calls: Calls) -> None:
        """Start the pending calls, each as a task: a task costs 0.1 ms, and a hanging one does not affect others."""
        pool = self._open_pool()
        with suppress(RuntimeError):  # the pool broke just now: `collect` schedules the missing calls again
            for i, call in enumerate(calls.all):
                if i not in calls.futures:
                    limit_s = self._time_limit_s * len(call.responses)
                    self._max_s = max(self._max_s, limit_s)
                    calls.futures[i] = (self._start_call(pool, call, limit_s), pool)

    def _start_call(self, pool: ProcessPool, call: _Call, limit_s: float) -> asyncio.Future[tuple[RewardResult, ...]]:
        arguments = (call.function, call.arguments, call.images)
        future = asyncio.wrap_future(pool.schedule(function_worker.call_all, args=arguments, timeout=limit_s))
        future.add_done_callback(partial(self._note_end, call.function))
        return future

    def _note_end(self, function: str, future: asyncio.Future[Any]) -> None:
        self._last_end = time.monotonic()
        if not future.cancelled() and future.exception() is None:
            self._have_returned.add(function)

    async def _results(self, calls: Calls, index: int) -> tuple[RewardResult, ...] | Trouble | None:
        """Return one result per response of the call; None if its pool broke before the call was made."""
        self._open_pool()
        if index not in calls.futures:
            return None
        function, (future, pool) = calls.all[index].function, calls.futures[index]
        await self._wait(future, pool, function)
        results = outcome(future, function, self._time_limit_s)
        if results is None:
            del calls.futures[index]
        return results

    async def _retry(self, call: _Call, trouble: Trouble) -> RewardResult:
        """Return the result of a second try for one response: the machine may have stalled, or other calls may have
        used its memory."""
        never = call.function not in self._have_returned
        if self._num_failed_retries >= (1 if never else _MAX_FAILED_RETRIES):
            return RewardResult(problem=trouble.problem, never_returned=never)
        if self._single is None or not self._single.active:
            await self._end_single()
            self._open_pool()  # raises if `close` came meanwhile
            self._single = self._start_pool(1, max_tasks=1)
        future = self._start_call(self._single, call, self._time_limit_s)
        await self._wait(future, self._single, call.function)
        results = outcome(future, call.function, self._time_limit_s)
        await self._end_single()  # a thread of the function may keep its process, for which the next try would wait
        self._num_failed_retries = self._num_failed_retries + 1 if isinstance(results, Trouble) else 0
        if results is None:
            problem = f"{trouble.problem}, and no process could be started to try again"
            return RewardResult(problem=problem, blame="infrastructure", retried=trouble.kind)
        if isinstance(results, Trouble):
            problem = f"{results.problem}, also in a second, separate try"
            return RewardResult(problem=problem, retried=trouble.kind, never_returned=never)
        return replace(results[0], retried=trouble.kind)

    async def _wait(self, future: asyncio.Future[tuple[RewardResult, ...]], pool: ProcessPool, function: str) -> None:
        """Return when the call is done or its pool broke."""
        start = time.monotonic()
        while not future.done() and pool.active:
            # Calls of other groups may be queued before this one.
            if time.monotonic() - max(start, self._last_end) > self._max_s + START_LIMIT_S + PATIENCE_S:
                raise RewardError(
                    f"the processes that score responses are stuck in front of {function}; if it is yours, does "
                    "importing its file always end?"
                )
            await asyncio.wait([future], timeout=1.0)
