"""Scores of responses by reward functions and reward servers, while other responses are still being generated."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from vlmrl.errors import RewardError
from vlmrl.rewards.client import Servers, checked, read_token
from vlmrl.rewards.function_worker import RewardResult
from vlmrl.rewards.functions import Calls, Functions
from vlmrl.rewards.protocol import reward_requests
from vlmrl.types import Group, Score

if TYPE_CHECKING:
    from vlmrl.config.reward import Scoring

REMOTE = "remote"
"""The name of a server's reward in the metrics."""

_HUNG_LIMIT = 8
"""Minimum number of responses before the run ends because a user's function hangs or dies on each of them."""

_HUNG_LIMIT_BEFORE_SUCCESS = 2
"""The same for a function that has never returned in the run."""

_Index = tuple[int, int]
"""(index of a group, index of the response in it)"""


class _Begun(NamedTuple):
    """A group that is being scored."""

    calls: Calls | None
    """The calls of functions."""
    results: list[asyncio.Future[RewardResult]]
    """Results from servers, one per response; empty without servers."""

    def end(self) -> None:
        """Cancel the pending calls and requests."""
        if self.calls is not None:
            self.calls.end()
        for result in self.results:
            result.cancel()


class Rewarder:
    """The reward functions and servers of a run. `start` starts them, `close` ends them; so does `async with`.

    `begin` starts on a group and returns; `score` collects, and starts on groups that were not begun.
    """

    def __init__(
        self, reward: Scoring, *, token: str | None = None, log: Path | None = None, label_key: str = "label"
    ) -> None:
        """Start nothing yet.

        Args:
            token: for the servers; None: the value of the environment variable VLMRL_RM_TOKEN.
            log: file for the output of functions.
            label_key: the column of the label.

        Raises ConfigError for invalid settings, such as an invalid URL.
        """
        self._max_failed_fraction = reward.max_failed_fraction
        self._user_source = reward.user_function.rpartition(":")[2] if reward.user_function else REMOTE
        self._weights = dict(reward.functions)
        self._functions: Functions | None = None
        self._servers: Servers | None = None
        self._begun: dict[object, deque[_Begun]] = defaultdict(deque)
        self._scoring = asyncio.Lock()
        if reward.functions or reward.user_function:
            self._functions = Functions(
                tuple(reward.functions),
                reward.user_function,
                num_workers=reward.num_workers,
                time_limit_s=reward.time_limit_s,
                pass_env=reward.pass_env,
                log=log,
                label_key=label_key,
            )
            self._weights = {name: reward.functions.get(name, reward.remote_weight) for name in self._functions.names}
        if reward.servers:
            self._weights[REMOTE] = reward.remote_weight
            self._servers = Servers(
                reward.servers,
                timeout_s=reward.remote_timeout_s,
                retries=reward.remote_retries,
                batch_size=reward.remote_batch_size,
                images=reward.remote_images,
                token=read_token() if token is None else token,
            )

    async def start(self) -> None:
        """Start the processes of the functions, and connect to the servers.

        Raises ConfigError if the user's function cannot be loaded or requires unknown arguments, if no server
        replies, and if one refuses the token.
        """
        try:
            if self._functions is not None:
                await self._functions.start()
            if self._servers is not None:
                await self._servers.start()
        except BaseException:
            await self.close()
            raise

    async def begin(self, group: Group) -> None:
        """Start on a group, and return before it is scored.

        Raises RewardError if its prompt has no label and a function needs one; `score` then does so too.
        """
        begun = await self._start_group(group)
        self._begun[_key(group)].append(begun)

    async def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        """Return one score per response, group by group.

        A response gets a failed score of 0 if its function raises, twice runs past `reward.time_limit_s` or ends its
        process, or does not return a finite number, and if no server scored it after `reward.remote_retries`. Network
        and operating system errors count as failures of the infrastructure, all others as the response's.

        Raises RewardError if a prompt has no label and a function needs one, if the infrastructure failed more than
        `reward.max_failed_fraction` of the responses, and if `reward.remote_url` scored none of them. That fraction is
        of these responses, or of `out_of`, which include them and others of which the infrastructure failed `failed`.
        """
        async with self._scoring:  # one at a time, see `Functions.collect`
            num_responses = max(sum(len(group.rollouts) for group in groups), out_of or 0)
            failures = _Failures(num_responses, self._max_failed_fraction, before=failed, user_source=self._user_source)
            begun: list[_Begun] = []
            try:
                for group in groups:
                    begun.append(await self._take(group))
                results = await self._collect(groups, begun, failures)
            except BaseException:
                for scoring in begun:
                    scoring.end()
                raise
        return [
            [_score(combined(results[i, j], self._weights)) for j in range(len(group.rollouts))]
            for i, group in enumerate(groups)
        ]

    async def close(self) -> None:
        """End every process and connection. Idempotent."""
        if self._functions is not None:
            await self._functions.close()
        if self._servers is not None:
            await self._servers.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _start_group(self, group: Group) -> _Begun:
        requests = reward_requests(group)
        missing = None if self._functions is None else self._functions.missing(requests[0])
        if missing is not None:
            raise RewardError(
                f"{missing}: set data.label_key to the column of the label, or choose another reward function"
            )
        return _Begun(
            calls=None if self._functions is None else await self._functions.begin(requests),
            results=[] if self._servers is None else self._servers.submit(requests),
        )

    async def _take(self, group: Group) -> _Begun:
        """Take the group out of those begun; if it was not begun, start on it now."""
        key = _key(group)
        if key not in self._begun:
            return await self._start_group(group)
        begun = self._begun[key].popleft()
        if not self._begun[key]:
            del self._begun[key]
        return begun

    async def _collect(
        self, groups: Sequence[Group], begun: Sequence[_Begun], failures: _Failures
    ) -> dict[_Index, dict[str, RewardResult]]:
        """Collect the result of each source for each response. Raises RewardError as `failures` does."""
        results: dict[_Index, dict[str, RewardResult]] = defaultdict(dict)
        if self._functions is not None:
            calls = [scoring.calls for scoring in begun if scoring.calls is not None]
            async with aclosing(self._functions.collect(calls)) as collected:
                async for i, j, name, result in collected:
                    results[i, j][name] = result
                    failures.see((i, j), name, result, groups[i].prompt.source)
        for i, scoring in enumerate(begun):
            for j, future in enumerate(scoring.results):
                result = results[i, j][REMOTE] = await future
                failures.see((i, j), REMOTE, result, groups[i].prompt.source)
        return results


class _Failures:
    """Failures of a step. Stops the run at too many of the infrastructure, and at a user's source that scores nothing.

    Other failures of responses do not stop the run: a policy may write text that is too hard for `math`, or unreadable
    for a function, until it learns not to.
    """

    def __init__(self, num_responses: int, max_fraction: float, *, before: int, user_source: str) -> None:
        """`max_fraction`: fraction of responses for which the infrastructure may fail, of which `before` have failed
        already. `user_source`: name of the user's source."""
        self._before = before
        self._num_responses = num_responses
        self._max_fraction = max_fraction
        self._user_source = user_source
        self._user_source_scored = False
        self._lost: dict[_Index, str] = {}
        """Responses that the infrastructure failed, and the reason."""
        self._broken: list[str] = []
        """Reasons why the user's source could not score a response."""
        self._num_retried = 0
        self._seen: set[_Index] = set()
        self._num_never = 0

    def see(self, response: _Index, name: str, result: RewardResult, source: str) -> None:
        """Raise RewardError as soon as a limit is exceeded, without waiting for the other responses."""
        self._seen.add(response)
        if result.problem is None:
            self._user_source_scored |= name == self._user_source
            return
        reason = f"{result.problem}, on {source}"
        if result.failure == "infrastructure":
            self._lost.setdefault(response, reason)
        if name == self._user_source:
            self._broken.append(reason)
            self._num_retried += result.retried is not None
            self._num_never += result.never_returned
        self._check_lost()
        self._check_user_source()

    def _check_lost(self) -> None:
        num_lost = self._before + len(self._lost)
        if self._lost and num_lost > self._max_fraction * self._num_responses:
            at_least = "at least " if len(self._seen) < self._num_responses else ""
            raise RewardError(
                f"{at_least}{num_lost} of {self._num_responses} responses could not be scored, more than "
                f"reward.max_failed_fraction {self._max_fraction:g}; the first: {next(iter(self._lost.values()))}"
            )

    def _check_user_source(self) -> None:
        if self._user_source_scored or self._max_fraction >= 1:
            return
        # Each hanging call takes twice the time limit: do not wait for all of them.
        hangs = self._num_retried > _HUNG_LIMIT and len(self._broken) > self._max_fraction * self._num_responses
        hangs = hangs or self._num_never >= _HUNG_LIMIT_BEFORE_SUCCESS
        if hangs or len(self._broken) == self._num_responses:
            raise RewardError(
                f"{self._user_source} of reward.remote_url scored none of the first {len(self._broken)} of "
                f"{self._num_responses} responses: fix it, or let it return a number for a response that it cannot "
                f"read; the first: {self._broken[0]}"
            )


def combined(results: Mapping[str, RewardResult], weights: Mapping[str, float]) -> RewardResult:
    """Return the weighted sum over the sources of reward; its parts are their values, unweighted.

    If a source failed, the sum has its problem and the value 0. The first failure of the response comes before any of
    the infrastructure: it decides the response's score, regardless of the other sources.
    """
    parts: dict[str, float] = {}
    failed = sorted((r for r in results.values() if r.failure), key=lambda result: result.failure != "response")
    retried = next((result.retried for result in results.values() if result.retried), None)
    for name in weights:
        if results[name].problem is None:
            key = re.sub(r"\W", "_", name, flags=re.ASCII)
            parts |= {key: results[name].value}
            parts |= {f"{key}/{part}": value for part, value in results[name].parts.items()}
    if failed:
        return RewardResult(parts=parts, problem=failed[0].problem, blame=failed[0].blame, retried=retried)
    total = sum(weight * results[name].value for name, weight in weights.items())
    return RewardResult(value=total, parts=parts, retried=retried)


def _score(result: RewardResult) -> Score:
    return Score(
        total=result.value,
        parts=result.parts,
        failure=result.failure,
        retried=result.retried,
        problem=result.problem,
    )


def check_functions(reward: Scoring, *, asks_servers: bool = True) -> None:
    """Start the reward sources as a run would, and end them. Raises ConfigError as `Rewarder` does.

    Without `asks_servers` servers need not be up yet.
    """
    for url in reward.servers:
        checked(url)
    if not asks_servers and reward.servers:
        reward = reward.model_copy(update={"remote_url": None})
    asyncio.run(_start_and_end(reward))


async def _start_and_end(reward: Scoring) -> None:
    async with Rewarder(reward):
        pass


def _key(group: Group) -> object:
    """Return the identity of a group: `begin` and `score` may get different copies of it."""
    return group.prompt.source, group.prompt.index, tuple(rollout.text for rollout in group.rollouts)
