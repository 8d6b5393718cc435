"""Stands in for `python`: has the fork server start the process, and ends as that ends. Standard library only.

Called with the server's address, the path of the real Python, and the arguments that `python` was called with.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Collection
from contextlib import suppress

_PARENT = os.getppid()
_POLL_S = 0.2
_PATIENCE_S = 40.0
"""For the server's imports. Ray gives a worker 60 seconds until it registers."""
_FLAGS = ("-u", "-B", "-E", "-s", "-P")
"""Flags of `python` that change nothing in a fork. The server has -P, which multiprocessing hands on."""
_OUTLIVE = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes of Python itself which outlive the one that starts them."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    address, python, *arguments = sys.argv[1:]
    words = list(arguments)
    while words and words[0] in _FLAGS:
        del words[0]
    server = socket.socket(socket.AF_UNIX)
    # Signals that come once the fork runs, but before they can be forwarded, must not end this process.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        if not words or (words[0].startswith("-") and words[0] != "-c"):
            raise ConnectionError(f"the server does not know {arguments}")
        if any(name in word for name in _OUTLIVE for word in words[:2]):
            raise ConnectionError("a fork would end with the server")
        server.connect(address)
        _request(server, words, blocked)
    except OSError:  # no server, or one that cannot fork
        server.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.execv(python, [python, *arguments])
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: _forward(server, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Whoever reads the process's output sees its end only once nobody else holds the other ends of the pipes.
    for descriptor in _descriptors():
        if descriptor != server.fileno():
            os.close(descriptor)
    _wait(server)
    status = server.recv(64)
    _end_like(int(status) if status else signal.SIGKILL)


def _request(server: socket.socket, arguments: list[str], blocked: Collection[int]) -> None:
    """Ask for the process, and wait until it has been forked. `blocked` are the signals that the caller blocks."""
    descriptors = [number for number in _descriptors() if os.get_inheritable(number)]
    request = [
        arguments,
        os.getcwd(),
        dict(os.environ),
        descriptors,
        os.nice(0),
        [int(number) for number in blocked],
        [int(number) for number in _FORWARDED if signal.getsignal(number) is signal.SIG_IGN],
        resource.getrlimit(resource.RLIMIT_NOFILE),
        _oom_score_adjustment(),
    ]
    data = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(server, [data], descriptors)
    if sent < len(data):  # else a short process may have ended already, and its socket, which nothing could be sent to
        server.sendall(data[sent:])
    end = time.monotonic() + _PATIENCE_S
    while not _wait(server, _POLL_S):
        # Those that come before the fork end this process, as they would end Python.
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        if time.monotonic() > end:
            raise ConnectionError("the server does not respond")
    if not server.recv(1):
        raise ConnectionError("the server does not fork")


def _wait(server: socket.socket, limit_s: float = float("inf")) -> bool:
    """Wait until the server has sent something; False after `limit_s`. Ends this process, and so the fork, with its
    parent."""
    end = time.monotonic() + limit_s
    while not select.select([server], [], [], _POLL_S)[0]:
        if os.getppid() != _PARENT:
            os._exit(1)
        if time.monotonic() > end:
            return False
    return True


def _forward(server: socket.socket, number: int) -> None:
    with suppress(OSError):  # the fork has ended
        server.send(bytes([number]))


def _descriptors() -> list[int]:
    """The open descriptors of this process."""
    numbers = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the listing itself
            os.fstat(number)
            numbers.append(number)
    return numbers


def _oom_score_adjustment() -> str:
    with open("/proc/self/oom_score_adj") as file:
        return file.read()


def _end_like(status: int) -> None:
    """End with the status of another process, as `waitpid` gives it."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
