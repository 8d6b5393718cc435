"""Scores answers with reward functions and reward servers, while other answers are still being written."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from vlmrl.errors import RewardError
from vlmrl.rewards.client import Servers, checked, read_token
from vlmrl.rewards.local import Calls, Functions
from vlmrl.rewards.local_worker import Verdict
from vlmrl.rewards.question import questions
from vlmrl.types import Group, Score

if TYPE_CHECKING:
    from vlmrl.config.reward import Scoring

REMOTE = "remote"
"""What the metrics call the reward of a server."""

_MOST_HUNG = 8
"""Answers that a user's function must be given, at least, before one that hangs or dies at each of them ends a run."""

_MOST_HUNG_EVER = 2
"""The same for one that has not returned even once in the run."""

_Answer = tuple[int, int]
"""(number of its group, number of the answer in it)"""


class _Begun(NamedTuple):
    """A group that is being scored."""

    calls: Calls | None
    """By functions."""
    asked: list[Future[Verdict]]
    """By servers, one per answer; none without servers."""

    def end(self) -> None:
        """Nobody waits for it any more."""
        if self.calls is not None:
            self.calls.end()
        for future in self.asked:
            future.cancel()


class Rewarder:
    """The reward functions and servers of a run. `close` ends what it started.

    `begin` starts on a group and returns; `score` collects, and starts on what was not begun. Both are for one thread.
    """

    def __init__(
        self, reward: Scoring, *, token: str | None = None, log: Path | None = None, label_key: str = "label"
    ) -> None:
        """Starts the processes of the functions, and sees whether a server answers. `token` is what servers ask for;
        by default what the environment variable VLMRL_RM_TOKEN holds. What functions print goes to `log`; `label_key`
        is the column of the label.

        Raises ConfigError when the user's function cannot be loaded or wants arguments that do not exist, when no
        server answers, and when one refuses the token.
        """
        self._max_failed_fraction = reward.max_failed_fraction
        self._own = reward.user_function.rpartition(":")[2] if reward.user_function else REMOTE
        self._weights = dict(reward.functions)
        self._functions: Functions | None = None
        self._servers: Servers | None = None
        self._begun: dict[object, deque[_Begun]] = defaultdict(deque)
        try:
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
                self._weights = {
                    name: reward.functions.get(name, reward.remote_weight) for name in self._functions.names
                }
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
                self._servers.check()
        except BaseException:
            self.close()
            raise

    def begin(self, group: Group) -> None:
        """Hand a group to whoever scores it, and return before that is done.

        Raises RewardError when its prompt has no label and a function needs one; `score` then does so too.
        """
        begun = self._start(group)
        self._begun[_name(group)].append(begun)

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        """One score per answer, group by group. Blocks: call it where nothing waits.

        An answer whose function raises, twice runs past `reward.time_limit_s` or ends its process, or returns something
        else than a finite number is a failed score of 0, and so is one that no server scored after
        `reward.remote_retries`. Errors of the network and the operating system are the infrastructure's doing, all
        others the response's.

        Raises RewardError when a prompt has no label and a function needs one, when the infrastructure failed more than
        `reward.max_failed_fraction` of the answers (of these, or of the `out_of` of which they are some and of whose
        others it failed `failed`), and when `reward.remote_url` gave none of them a score.
        """
        begun: list[_Begun] = []
        verdicts: dict[_Answer, dict[str, Verdict]] = defaultdict(dict)
        num_answers = sum(len(group.rollouts) for group in groups)
        failures = _Failures(max(num_answers, out_of or 0), self._max_failed_fraction, before=failed, own=self._own)
        try:
            for asked in groups:
                begun.append(self._take(asked))
            if self._functions is not None:
                with closing(self._functions.collect([one.calls for one in begun if one.calls is not None])) as found:
                    for group, answer, name, verdict in found:
                        verdicts[group, answer][name] = verdict
                        failures.see((group, answer), name, verdict, groups[group].prompt.source)
            for group, one in enumerate(begun):
                for answer, future in enumerate(one.asked):
                    verdict = future.result()
                    verdicts[group, answer][REMOTE] = verdict
                    failures.see((group, answer), REMOTE, verdict, groups[group].prompt.source)
        except BaseException:
            for one in begun:
                one.end()
            raise
        return [
            [_score(combined(verdicts[number, answer], self._weights)) for answer in range(len(group.rollouts))]
            for number, group in enumerate(groups)
        ]

    def close(self) -> None:
        """Ends every process and connection that scoring started. Idempotent."""
        if self._functions is not None:
            self._functions.close()
        if self._servers is not None:
            self._servers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, group: Group) -> _Begun:
        asked = questions(group)
        missing = None if self._functions is None else self._functions.missing(asked[0])
        if missing is not None:
            raise RewardError(
                f"{missing}: set data.label_key to the column of the label, or choose another reward function"
            )
        return _Begun(
            calls=None if self._functions is None else self._functions.begin(asked),
            asked=[] if self._servers is None else self._servers.ask(asked),
        )

    def _take(self, group: Group) -> _Begun:
        """What was begun of it; what was not begins now."""
        name = _name(group)
        if name not in self._begun:
            return self._start(group)
        begun = self._begun[name].popleft()
        if not self._begun[name]:
            del self._begun[name]
        return begun


class _Failures:
    """Stops at too many answers that the infrastructure failed, and at a source of the user's that scores none.

    What the responses do themselves stops nothing otherwise: a policy may write what is too hard for `math`, or what a
    function cannot read, for as long as it learns not to.
    """

    def __init__(self, num_answers: int, most: float, *, before: int, own: str) -> None:
        """`most` is the share that the infrastructure may fail, of which it failed so many `before`; `own` is the name
        of the user's source."""
        self._before = before
        self._num_answers = num_answers
        self._most = most
        self._own = own
        self._own_has_scored = False
        self._lost: dict[_Answer, str] = {}
        """What the infrastructure failed, and why."""
        self._broken: list[str] = []
        """Why the user's source could not score an answer."""
        self._num_retried = 0
        self._seen: set[_Answer] = set()
        self._num_never = 0

    def see(self, answer: _Answer, name: str, verdict: Verdict, source: str) -> None:
        """Raises RewardError as soon as it is clear, not after waiting for the others."""
        self._seen.add(answer)
        if verdict.problem is None:
            self._own_has_scored |= name == self._own
            return
        reason = f"{verdict.problem}, on {source}"
        if verdict.failure == "infrastructure":
            self._lost.setdefault(answer, reason)
        if name == self._own:
            self._broken.append(reason)
            self._num_retried += verdict.retried is not None
            self._num_never += verdict.never_returned
        self._check_lost()
        self._check_own()

    def _check_lost(self) -> None:
        num_lost = self._before + len(self._lost)
        if self._lost and num_lost > self._most * self._num_answers:
            at_least = "at least " if len(self._seen) < self._num_answers else ""
            raise RewardError(
                f"{at_least}{num_lost} of {self._num_answers} answers could not be scored, more than "
                f"reward.max_failed_fraction {self._most:g}; the first: {next(iter(self._lost.values()))}"
            )

    def _check_own(self) -> None:
        if self._own_has_scored or self._most >= 1:
            return
        # Each that hangs takes twice the time limit: nobody waits for all of them.
        hangs = self._num_retried > _MOST_HUNG and len(self._broken) > self._most * self._num_answers
        hangs = hangs or self._num_never >= _MOST_HUNG_EVER
        if hangs or len(self._broken) == self._num_answers:
            raise RewardError(
                f"{self._own} of reward.remote_url scored none of the first {len(self._broken)} of {self._num_answers} "
                f"answers: mend it, or let it return a number for what it cannot read; the first: {self._broken[0]}"
            )


def combined(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Verdict:
    """The weighted sum over the sources of reward; its parts are what each of them said, unweighted.

    The first problem of a source is that of the whole, before all one that is the response's doing: that says what it
    is worth, whatever the others would have said. Then the value is 0.
    """
    parts: dict[str, float] = {}
    failed = sorted((v for v in verdicts.values() if v.failure), key=lambda verdict: verdict.failure != "response")
    retried = next((verdict.retried for verdict in verdicts.values() if verdict.retried), None)
    for name in weights:
        if verdicts[name].problem is None:
            key = re.sub(r"\W", "_", name, flags=re.ASCII)
            parts |= {key: verdicts[name].value}
            parts |= {f"{key}/{part}": value for part, value in verdicts[name].parts.items()}
    if failed:
        return Verdict(parts=parts, problem=failed[0].problem, blame=failed[0].blame, retried=retried)
    total = sum(weight * verdicts[name].value for name, weight in weights.items())
    return Verdict(value=total, parts=parts, retried=retried)


def _score(verdict: Verdict) -> Score:
    return Score(
        total=verdict.value,
        parts=verdict.parts,
        failure=verdict.failure,
        retried=verdict.retried,
        problem=verdict.problem,
    )


def check_functions(reward: Scoring, *, asks_servers: bool = True) -> None:
    """Start what scores answers as a run would, and leave nothing behind. Raises ConfigError as `Rewarder` does.

    Without `asks_servers` they need not be up yet.
    """
    for url in reward.servers:
        checked(url)
    if not asks_servers and reward.servers:
        reward = reward.model_copy(update={"remote_url": None})
    Rewarder(reward).close()


def _name(group: Group) -> object:
    """What a group is known by: `begin` and `score` may see copies of it."""
    return group.prompt.source, group.prompt.index, tuple(rollout.text for rollout in group.rollouts)
