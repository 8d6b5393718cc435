"""Serve the page of runs on loopback, made anew while a run goes on."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console

from vlmrl.errors import ConfigError
from vlmrl.report.page import report
from vlmrl.system.plain_text import print_line

_HOST = "127.0.0.1"
_FOLLOW_S = 15.0
"""Interval in which the page reloads itself."""


class LivePage:
    """The page of runs, which reloads itself every `follow_s`. It is made at most twice in that time, by one thread."""

    def __init__(self, runs: Sequence[Path], *, max_mib: float, follow_s: float = _FOLLOW_S) -> None:
        self._runs = runs
        self._max_mib = max_mib
        self._follow_s = follow_s
        self._lock = threading.Lock()
        self._made_at = float("-inf")
        self._page = b""

    def get(self) -> bytes:
        """Return the page as it was at most half of `follow_s` ago."""
        with self._lock:
            if time.monotonic() - self._made_at > self._follow_s / 2:
                self._page = report(self._runs, max_mib=self._max_mib, follow_s=self._follow_s).encode()
                self._made_at = time.monotonic()
            return self._page


def serve(runs: Sequence[Path], *, port: int, max_mib: float) -> None:
    """Serve the page of these runs until Ctrl-C. The address, which holds a secret, is printed.

    Raises:
        ConfigError: a folder holds no run, or the port is taken.
    """
    page = LivePage(runs, max_mib=max_mib)
    page.get()  # mistakes come before the address
    try:
        server = make_server(page, port=port)
    except OSError as error:
        raise ConfigError(f"report.port {port}: {error.strerror}: choose another, or 0 for a free one") from error
    with server:
        print_line(Console(), f"vlmrl report: {server.url} (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)


class Server(ThreadingHTTPServer):
    """Answers `/<secret>/` with the page, and all else with 404: other users of the machine can reach loopback, too."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.page = page
        self.path = f"/{secrets.token_urlsafe(16)}/"

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self.server_port}{self.path}"


def make_server(page: LivePage, *, port: int) -> Server:
    """Listen on loopback. Raises OSError when the port is taken."""
    return Server(page, port)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "vlmrl"
    sys_version = ""

    def handle(self) -> None:
        with suppress(ConnectionError):  # a reader who closes the page while it is sent
            super().handle()

    def do_GET(self) -> None:
        if not secrets.compare_digest(self.path.encode(), self.server.path.encode()):
            self.send_error(404)
            return
        try:
            page = self.server.page.get()
        except Exception as error:  # the folder was moved or deleted, or holds what no run writes
            self.send_error(503, explain=f"{type(error).__name__}: {error}")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *args: object) -> None:
        """Print nothing: the address is a secret."""
