"""Whose doing a failure is, told by the class of the error without importing its package."""

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

from vlmrl.rewards.failures import TooHardError, count_failures, doing_of
from vlmrl.types import Score

ASKED = httpx.Request("POST", "http://judge")


def answered(status: int) -> requests.Response:
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
        urllib.error.HTTPError("http://judge", 503, "busy", http.client.HTTPMessage(), None),
        *(requests.HTTPError("not now", response=answered(status)) for status in (401, 404, 429, 500)),
        httpx.HTTPStatusError("down", request=ASKED, response=httpx.Response(502)),
        caused(httpx.ConnectError("no route")),
        caused(caused(ConnectionResetError())),
    ],
    ids=lambda error: type(error).__name__,
)
def test_network_and_machine_are_infrastructure(error: BaseException) -> None:
    assert doing_of(error) == "infrastructure"


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
        urllib.error.HTTPError("http://judge", 413, "too long", http.client.HTTPMessage(), None),
        requests.HTTPError("too long for the judge", response=answered(400)),
        caused(requests.HTTPError("no text", response=answered(422))),
        httpx.HTTPStatusError("too long", request=ASKED, response=httpx.Response(400)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_everything_else_is_the_responses_doing(error: BaseException) -> None:
    assert doing_of(error) == "response"


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError(), KeyError()
    one.__cause__, two.__cause__ = two, one
    assert doing_of(one) == "response"


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
