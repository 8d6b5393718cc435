"""Servers on this machine stand for the web, where `is_allowed` says so."""

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from vlmrl.data.download import download, is_public
from vlmrl.errors import DataError

Reply = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextmanager
def web(reply: Reply, host: str = "127.0.0.1") -> Iterator[tuple[int, list[str]]]:
    """The port of a server, and the hosts that its clients asked for."""
    hosts: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hosts.append(self.headers["Host"])
            with suppress(OSError):  # the client has gone
                reply(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((host, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_port, hosts
        server.shutdown()


def says(body: bytes, status: int = 200, **headers: str) -> Reply:
    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def drips(what: bytes) -> Reply:
    """A byte now and then, for ever: no single read ever takes long."""

    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.write(what)
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.05)

    return reply


def get(url: str, **settings: Any) -> bytes:
    settings = {"max_bytes": 1000, "limit_s": 5.0, "is_allowed": lambda address: address == "127.0.0.1"} | settings
    return download(url, "image x", **settings)


def test_a_body_arrives_also_by_redirects() -> None:
    with web(says(b"pixels")) as (port, hosts):
        assert get(f"http://localhost:{port}/a b.png?x=1") == b"pixels"
        assert hosts == [f"localhost:{port}"]
        with web(says(b"", 302, Location=f"http://127.0.0.1:{port}/")) as (first, _):
            assert get(f"http://127.0.0.1:{first}/") == b"pixels"


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "192.0.2.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1"),
        *("64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::1", "2001:0:7f00:1::1", "64:ff9b:1::1"),
    ],
)
def test_private_addresses_are_none_of_the_web(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"]
)
def test_no_spelling_of_this_machine_is_connected_to(host: str) -> None:
    with (
        web(says(b"secret")) as (port, hosts),
        pytest.raises(DataError, match=r"^image x cannot be downloaded: host .* which is not a public one$") as error,
    ):
        get(f"http://{host}:{port}/", is_allowed=is_public)
    assert hosts == []
    assert "\n" not in str(error.value)


def test_every_redirect_is_checked_like_the_first_address() -> None:
    targets = [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]:1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
    ]
    for target in targets:
        with (
            web(says(b"", 302, Location=target)) as (port, _),
            pytest.raises(DataError, match=r"not a public one|no http address"),
        ):
            get(f"http://127.0.0.1:{port}/")
    with web(says(b"", 302, Location="/again")) as (port, hosts), pytest.raises(DataError, match="more than 5 redir"):
        get(f"http://127.0.0.1:{port}/")
    assert len(hosts) == 6


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may say something else when it is asked a second time."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def rebinding(host: Any, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name == "rebind.test":
            asked.append(name)
            name = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
        return real(name, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    with web(says(b"checked")) as (port, hosts):
        assert get(f"http://rebind.test:{port}/") == b"checked"
        assert hosts == [f"rebind.test:{port}"]
    assert asked == ["rebind.test"]


@pytest.mark.parametrize(
    "reply",
    [drips(b"HTTP/1.0 200 OK\r\n\r\n"), drips(b"HTTP/1.0 200 OK\r\nX: "), drips(b"")],
    ids=["body", "head", "all"],
)
def test_the_deadline_is_for_the_whole_however_slowly_it_comes(reply: Reply) -> None:
    with web(reply) as (port, _):
        start = time.monotonic()
        with pytest.raises(DataError, match=r"it takes longer than 0\.5 s"):
            get(f"http://127.0.0.1:{port}/", limit_s=0.5, max_bytes=10**9)
        assert time.monotonic() - start < 3


def test_a_name_server_that_is_silent_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()

    def wait(*_: Any, **__: Any) -> Any:
        silent.wait(20)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    start = time.monotonic()
    with pytest.raises(DataError, match="it takes longer"):
        get("http://example.test/", limit_s=0.2)
    assert time.monotonic() - start < 5
    silent.set()


def test_a_body_ends_at_the_bound() -> None:
    with web(says(b"x" * 1001)) as (port, _):
        assert len(get(f"http://127.0.0.1:{port}/", max_bytes=1001)) == 1001
        with pytest.raises(DataError, match=r"it is larger than .* MiB: raise data\.max_image_mib"):
            get(f"http://127.0.0.1:{port}/")


def test_a_body_is_never_unpacked() -> None:
    with (
        web(says(b"\x1f\x8b", Content_Encoding="gzip")) as (port, _),
        pytest.raises(DataError, match="encoded as gzip, which was not asked for"),
    ):
        get(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (says(b"", 404), "status 404"),
        (says(b"", 302), "status 302"),
        (says(b"short", Content_Length="99"), "cannot be downloaded"),
        (lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n"), "cannot be downloaded"),
        (lambda handler: handler.connection.close(), "cannot be downloaded"),
    ],
)
def test_what_is_no_image_server_is_told_in_one_line(reply: Reply, said: str) -> None:
    with web(reply) as (port, _), pytest.raises(DataError, match=said) as error:
        get(f"http://127.0.0.1:{port}/")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://", "http://[", "http://a:b/", "http://\x00/", "https://" + "a" * 300, "http://x y/"]
)
def test_what_is_no_url_is_told_in_one_line(url: str) -> None:
    with pytest.raises(DataError, match="cannot be downloaded: ") as error:
        get(url)
    assert "\n" not in str(error.value)


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with web(says(b"direct")) as (port, _):
        assert get(f"http://127.0.0.1:{port}/") == b"direct"
