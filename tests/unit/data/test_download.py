"""Local servers stand in for the web; `is_allowed` admits their address."""

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
    """Run a server; yields its port and the Host headers of its requests."""
    hosts: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hosts.append(self.headers["Host"])
            with suppress(OSError):  # the client has disconnected
                reply(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((host, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_port, hosts
        server.shutdown()


def responds(body: bytes, status: int = 200, **headers: str) -> Reply:
    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def drips(start: bytes) -> Reply:
    """Send one byte at a time for ever, so that no single read takes long."""

    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.write(start)
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.05)

    return reply


def get(url: str, **settings: Any) -> bytes:
    settings = {"max_bytes": 1000, "limit_s": 5.0, "is_allowed": lambda address: address == "127.0.0.1"} | settings
    return download(url, "image x", **settings)


def test_a_body_is_downloaded_also_through_redirects() -> None:
    with web(responds(b"pixels")) as (port, hosts):
        assert get(f"http://localhost:{port}/a b.png?x=1") == b"pixels"
        assert hosts == [f"localhost:{port}"]
        with web(responds(b"", 302, Location=f"http://127.0.0.1:{port}/")) as (first, _):
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
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"]
)
def test_this_machine_is_refused_in_every_spelling(host: str) -> None:
    with (
        web(responds(b"secret")) as (port, hosts),
        pytest.raises(DataError, match=r"^image x cannot be downloaded: host .* which is not public$") as error,
    ):
        get(f"http://{host}:{port}/", is_allowed=is_public)
    assert hosts == []
    assert "\n" not in str(error.value)


def test_redirects_are_checked_like_the_first_address() -> None:
    targets = [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]:1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
    ]
    for target in targets:
        with (
            web(responds(b"", 302, Location=target)) as (port, _),
            pytest.raises(DataError, match=r"which is not public|not http"),
        ):
            get(f"http://127.0.0.1:{port}/")
    with (
        web(responds(b"", 302, Location="/again")) as (port, hosts),
        pytest.raises(DataError, match="more than 5 redir"),
    ):
        get(f"http://127.0.0.1:{port}/")
    assert len(hosts) == 6


def test_the_checked_address_is_the_one_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may return another address the second time (DNS rebinding)."""
    resolved: list[str] = []
    real = socket.getaddrinfo

    def rebinding(host: Any, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name == "rebind.test":
            resolved.append(name)
            name = "127.0.0.1" if len(resolved) == 1 else "127.0.0.2"
        return real(name, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    with web(responds(b"checked")) as (port, hosts):
        assert get(f"http://rebind.test:{port}/") == b"checked"
        assert hosts == [f"rebind.test:{port}"]
    assert resolved == ["rebind.test"]


@pytest.mark.parametrize(
    "reply",
    [drips(b"HTTP/1.0 200 OK\r\n\r\n"), drips(b"HTTP/1.0 200 OK\r\nX: "), drips(b"")],
    ids=["body", "head", "all"],
)
def test_the_time_limit_covers_the_whole_download(reply: Reply) -> None:
    with web(reply) as (port, _):
        start = time.monotonic()
        with pytest.raises(DataError, match=r"it takes longer than 0\.5 s"):
            get(f"http://127.0.0.1:{port}/", limit_s=0.5, max_bytes=10**9)
        assert time.monotonic() - start < 3


def test_a_silent_name_server_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_size_of_a_body_is_limited() -> None:
    with web(responds(b"x" * 1001)) as (port, _):
        assert len(get(f"http://127.0.0.1:{port}/", max_bytes=1001)) == 1001
        with pytest.raises(DataError, match=r"it is larger than .* MiB: raise data\.max_image_mib"):
            get(f"http://127.0.0.1:{port}/")


def test_a_compressed_body_is_refused() -> None:
    with (
        web(responds(b"\x1f\x8b", Content_Encoding="gzip")) as (port, _),
        pytest.raises(DataError, match="content encoding is gzip, which was not requested"),
    ):
        get(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (responds(b"", 404), "status 404"),
        (responds(b"", 302), "status 302"),
        (responds(b"short", Content_Length="99"), "cannot be downloaded"),
        (lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n"), "cannot be downloaded"),
        (lambda handler: handler.connection.close(), "cannot be downloaded"),
    ],
)
def test_a_bad_response_is_reported_in_one_line(reply: Reply, message: str) -> None:
    with web(reply) as (port, _), pytest.raises(DataError, match=message) as error:
        get(f"http://127.0.0.1:{port}/")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://", "http://[", "http://a:b/", "http://\x00/", "https://" + "a" * 300, "http://x y/"]
)
def test_a_bad_url_is_reported_in_one_line(url: str) -> None:
    with pytest.raises(DataError, match="cannot be downloaded: ") as error:
        get(url)
    assert "\n" not in str(error.value)


def test_proxies_from_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with web(responds(b"direct")) as (port, _):
        assert get(f"http://127.0.0.1:{port}/") == b"direct"
