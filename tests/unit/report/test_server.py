from __future__ import annotations

import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import make_run, served

from vlmrl.report.server import LivePage, Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(LivePage([make_run(tmp_path / "run")], max_mib=15, follow_s=0.0)) as opened:
        yield opened


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        text: str = answer.read().decode()
        return text


def test_the_page_is_served_as_the_run_is_now(server: Server, tmp_path: Path) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert "later/metric" not in get(server.url)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 9, "later/metric": 1.0}\n')
    assert "later/metric" in get(server.url)


def test_without_the_secret_nothing_is_served(server: Server) -> None:
    root = server.url.removesuffix(server.path)
    for path in ("/", "/report.html", "/x" * 8, server.path[:-2]):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(root + path, timeout=60)


def test_a_reader_who_goes_away_leaves_no_traceback(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server.page, "get", lambda: b"x" * 2**25)  # more than sockets hold
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.server_port)) as reader:
            reader.sendall(f"GET {server.path} HTTP/1.0\r\n\r\n".encode())
            reader.recv(100)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
    assert get(server.url)
    time.sleep(0.2)  # the threads of the others
    assert capfd.readouterr().err == ""


def test_an_error_while_the_page_is_made_is_an_error_of_the_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> bytes:
        raise TypeError("odd")

    monkeypatch.setattr(server.page, "get", fail)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(server.url)
    assert capfd.readouterr().err == ""


def test_a_folder_that_is_gone_is_an_error_of_the_answer(server: Server, tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(server.url, timeout=60)
