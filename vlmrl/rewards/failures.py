"""Classification of failures to score a response, as the response's or the infrastructure's, and their counts."""

import errno
import re
from collections.abc import Callable, Sequence

from vlmrl.types import Failure, Group, Metrics, Score

_NETWORK = {
    ("aiohttp", "ClientError"),
    ("anthropic", "APIError"),
    ("botocore", "BotoCoreError"),
    ("grpc", "RpcError"),
    ("http", "HTTPException"),
    ("httpcore", "NetworkError"),
    ("httpcore", "ProtocolError"),
    ("httpcore", "TimeoutException"),
    ("httpx", "HTTPError"),
    ("httpx", "StreamError"),
    ("openai", "APIError"),
    ("requests", "RequestException"),
    ("urllib3", "HTTPError"),
    ("websockets", "WebSocketException"),
}
"""(package, class) of network errors that are not an OSError; none of the packages is imported for that."""
_UNFIT = frozenset({errno.E2BIG, errno.ENAMETOOLONG})
"""Operating system errors about their input: a text as the name of a file, or as an argument of a command."""
_REFUSALS = frozenset({400, 413, 422})
"""Statuses of a server that works and refuses its input: too long, or not in its format."""
_MAX_CAUSES = 10
_MAX_KINDS = 20
"""Kinds of failures that are shown, so that a run of weeks does not fill its log with them."""


class TooHardError(Exception):
    """A reward function gave up on a response at its own time limit."""


def failure_of(error: BaseException) -> Failure:
    """Return the cause of an error: `infrastructure` for network and operating system errors, also as the cause (`raise
    ... from`) of another error, and `response` for all others. Errors about the request's content are of kind
    `response`: a response must not escape the loss by being too long for its reward source."""
    seen: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if seen is None:
            break
        if isinstance(seen, OSError) or any(_is_of_network(kind) for kind in type(seen).__mro__):
            return "response" if _is_about_content(seen) else "infrastructure"
        seen = seen.__cause__
    return "response"


_METRICS: dict[Failure, str] = {
    "infrastructure": "reward/failed_infrastructure",
    "response": "reward/failed_response",
}


def count_failures(scores: Sequence[Score]) -> Metrics:
    """Return the number of responses that could not be scored, by kind, and of those scored a second time, by
    reason."""
    return {
        **{name: float(sum(score.failure == kind for score in scores)) for kind, name in _METRICS.items()},
        "reward/retried_timeouts": float(sum(score.retried == "timeout" for score in scores)),
        "reward/retried_deaths": float(sum(score.retried == "death" for score in scores)),
    }


class FirstFailures:
    """Shows people the first failure of each kind with its row; all are counted and in the transcripts."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._known: set[str] = set()

    def see(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> None:
        """Show responses that could not be scored."""
        for group, group_scores in zip(groups, scores, strict=True):
            for score in group_scores:
                if score.problem is not None and score.failure is not None:
                    what = f"reward: a response to {group.prompt.source} could not be scored"
                    self._see(what, score.problem, _METRICS[score.failure])

    def see_episodes(self, groups: Sequence[Group]) -> None:
        """Show conversations whose environment failed or raised, also where it did not when they were played again."""
        for group in groups:
            for episode in (rollout.episode for rollout in group.rollouts if rollout.episode is not None):
                subject = f"agent: the episode of {group.prompt.source}"
                for problem in episode.retried:
                    self._see(f"{subject} was played again", problem, "agent/retries")
                if episode.problem is not None:
                    self._see(f"{subject} {episode.stop}", episode.problem, f"agent/stop/{episode.stop}")

    def _see(self, what: str, problem: str, metric: str) -> None:
        # `ValueError: cannot read 'x' (reward.py:12)` is of the kind ValueError, without numbers.
        kind = f"{metric} {re.sub(r'[0-9.]+', '#', problem.partition(': ')[0])}"
        if kind in self._known or len(self._known) == _MAX_KINDS:
            return
        self._known.add(kind)
        self._say(f"{what}: {problem}; more of this kind are counted in {metric}, and each is in the transcripts")


def _is_about_content(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _UNFIT:
        return True
    # The names of the status in requests, httpx, openai and anthropic (with or without a response), aiohttp and urllib.
    reply = getattr(error, "response", None)
    statuses = [getattr(source, name, None) for source in (reply, error) for name in ("status_code", "status", "code")]
    return next((status for status in statuses if isinstance(status, int)), None) in _REFUSALS


def _is_of_network(kind: type) -> bool:
    return (str(kind.__module__).partition(".")[0], kind.__name__) in _NETWORK
