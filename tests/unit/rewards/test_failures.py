"""The kind of a failure, recognised by the class of the error without importing its package."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import subprocess
import urllib.error

import httpx
import pytest
import requests
import urllib3
from rewards.responses import group

from vlmrl.rewards.failures import FirstFailures, TooHardError, count_failures, failure_of
from vlmrl.types import Failure, Score

ASKED = httpx.Request("POST", "http://scorer")


def reply(status: int) -> requests.Response:
    response = requests.Response()
    response.status_code = status
    return response


def caused(cause: BaseException) -> BaseException:
    error = RuntimeError("the server of my reward is gone")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError("disk"),
        ConnectionRefusedError(),
        TimeoutError(),
        socket.gaierror(),
        ssl.SSLError(),
        urllib.error.URLError("no route"),
        http.client.RemoteDisconnected(),
        http.client.IncompleteRead(b""),
        requests.ConnectionError(),
        requests.Timeout(),
        requests.HTTPError(),
        httpx.ConnectError("no route"),
        httpx.ReadTimeout("slow"),
        httpx.HTTPStatusError("500", request=None, response=None),  # type: ignore[arg-type]
        urllib3.exceptions.ProtocolError(),
        OSError(errno.ENOSPC, "No space left on device"),
        urllib.error.HTTPError("http://scorer", 503, "busy", http.client.HTTPMessage(), None),
        *(requests.HTTPError("not now", response=reply(status)) for status in (401, 404, 429, 500)),
        httpx.HTTPStatusError("down", request=ASKED, response=httpx.Response(502)),
        caused(httpx.ConnectError("no route")),
        caused(caused(ConnectionResetError())),
    ],
    ids=lambda error: type(error).__name__,
)
def test_network_and_machine_are_infrastructure(error: BaseException) -> None:
    assert failure_of(error) == "infrastructure"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("cannot read"),
        KeyError("score"),
        RecursionError(),
        MemoryError(),
        SystemExit(1),
        KeyboardInterrupt(),
        TooHardError(),
        subprocess.TimeoutExpired("python", 1),
        httpx.InvalidURL("what the response calls a URL"),
        caused(ValueError()),
        OSError(errno.ENAMETOOLONG, "File name too long"),
        OSError(errno.E2BIG, "Argument list too long"),
        urllib.error.HTTPError("http://scorer", 413, "too long", http.client.HTTPMessage(), None),
        requests.HTTPError("too long for the scorer", response=reply(400)),
        caused(requests.HTTPError("no text", response=reply(422))),
        httpx.HTTPStatusError("too long", request=ASKED, response=httpx.Response(400)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_failures_of_the_response(error: BaseException) -> None:
    assert failure_of(error) == "response"


def test_a_cycle_of_causes_ends() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert failure_of(first) == "response"


def test_failures_are_counted_by_kind_and_second_tries_by_reason() -> None:
    scores = [
        Score(1.0),
        Score(1.0, retried="timeout"),
        Score(0.0, failure="response", retried="timeout"),
        Score(0.0, failure="response", retried="death"),
        Score(0.0, failure="infrastructure"),
    ]
    assert count_failures(scores) == {
        "reward/failed_infrastructure": 1.0,
        "reward/failed_response": 2.0,
        "reward/retried_timeouts": 2.0,
        "reward/retried_deaths": 1.0,
    }


def failed(problem: str, failure: Failure = "response") -> Score:
    return Score(0.0, failure=failure, problem=problem)


def test_the_first_failure_of_each_kind_is_shown_with_its_row() -> None:
    message: list[str] = []
    first = FirstFailures(message.append)
    ones = group("a", "b", "c")
    first.see([ones], [[Score(1.0), failed("ValueError: x (r.py:1)"), failed("ValueError: y (r.py:2)")]])
    first.see([ones], [[failed("f took longer than 10"), failed("f took longer than 20.5"), failed("ValueError: z")]])
    first.see([ones], [[failed("ValueError: x (r.py:1)", "infrastructure"), Score(1.0), Score(0.5)]])
    assert [line.partition("; ")[0] for line in message] == [
        "reward: a response to shapes:17 could not be scored: ValueError: x (r.py:1)",
        "reward: a response to shapes:17 could not be scored: f took longer than 10",
        "reward: a response to shapes:17 could not be scored: ValueError: x (r.py:1)",
    ]
    assert "reward/failed_infrastructure" in message[2]


def test_a_run_of_weeks_does_not_fill_its_log_with_kinds() -> None:
    message: list[str] = []
    first = FirstFailures(message.append)
    for number in range(100):
        first.see([group("a")], [[failed(f"Error{chr(97 + number % 26)}{chr(97 + number // 26)}: x")]])
    assert len(message) == 20
