from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import command

from vlmrl.system import fork_client
from vlmrl.system import fork_server as module
from vlmrl.system.fork_server import VARIABLE, fork_server

SLEEP = "import time; print('started', flush=True); time.sleep(20)"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The command of a server that has imported `decimal`."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    with fork_server(tmp_path, ["decimal"]):
        yield os.environ[VARIABLE]


def run(python: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *arguments], capture_output=True, text=True, timeout=60, check=False, **options)


def servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "vlmrl.system.fork_server" in command(child)]


def children_of_server() -> list[psutil.Process]:
    """The forks, and the processes that attend to them."""
    return [child for server in servers() for child in server.children(recursive=True)]


def test_a_fork_has_the_modules_of_the_server_and_all_that_the_client_was_given(python: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "print(json.dumps(['decimal' in sys.modules, 'fractions' in sys.modules, sys.argv[1:], __name__, os.getcwd(),\n"
        "    os.environ['GIVEN'], 'OTHER' in os.environ, sys.stdin.read(), os.nice(0), __file__]))\n"
        "print('to stderr', file=sys.stderr)\n"
    )
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    done = run(
        python,
        *("-u", str(script), "one", "--two"),
        input="typed",
        cwd=folder,
        env={"GIVEN": "value", "PATH": os.environ["PATH"]},
        preexec_fn=lambda: os.nice(3),
    )
    expected = [
        True,
        False,
        ["one", "--two"],
        "__main__",
        str(folder),
        "value",
        False,
        "typed",
        min(19, os.nice(0) + 3),
        str(script),
    ]
    assert json.loads(done.stdout) == expected
    assert (done.stderr, done.returncode) == ("to stderr\n", 0)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import sys; sys.exit('a reason')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_the_client_ends_like_the_fork(python: str, code: str, expected: int) -> None:
    done = run(python, "-c", code)
    assert done.returncode == expected
    assert ("ZeroDivisionError" in done.stderr) == (code == "1 / 0")
    assert ("a reason" in done.stderr) == ("a reason" in code)


def test_a_process_that_ends_before_its_client_goes_on_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client, attendant = socket.socketpair()
    send = socket.send_fds

    def send_to_a_short_process(*request: Any) -> int:
        sent = send(*request)
        attendant.recv(1 << 20)
        attendant.sendall(b"!0")
        attendant.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_to_a_short_process)
    with client:
        fork_client._request(client, ["-c", "pass"], [])  # an error would start an ordinary Python
        assert client.recv(64) == b"0"


def test_threads_and_exit_functions_are_waited_for(python: str) -> None:
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print('main')"
    )
    assert run(python, "-c", code).stdout.split("\n") == ["main", "thread", "at exit", ""]


def test_forks_draw_different_random_numbers(python: str) -> None:
    draws = {run(python, "-c", "import random; print(random.random())").stdout for _ in range(2)}
    assert len(draws) == 2


def test_descriptors_arrive_under_their_numbers_and_close_with_the_fork(python: str) -> None:
    reading, writing = os.pipe()
    done = run(python, "-c", f"import os; os.write({writing}, b'through the pipe')", pass_fds=[writing])
    os.close(writing)
    assert (done.returncode, os.read(reading, 100)) == (0, b"through the pipe")
    assert os.read(reading, 100) == b"", "somebody holds the other end"
    os.close(reading)


def test_multiprocessing_can_use_it(python: str) -> None:
    context = multiprocessing.get_context("spawn")
    before = spawn.get_executable()
    multiprocessing.set_executable(python)
    try:
        queue = context.Queue()
        process = context.Process(target=queue.put, args=(["a", "list"],))
        process.start()
        assert queue.get(timeout=30) == ["a", "list"]
        process.join(30)
        assert process.exitcode == 0
    finally:
        multiprocessing.set_executable(before)


def test_a_process_that_a_fork_starts_is_a_fork_too(python: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def show(): print('decimal' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_executable(sys.argv[1])\n"
        "    process = multiprocessing.get_context('spawn').Process(target=show)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    assert run(python, str(script), python).stdout == "True\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_client_ends_the_fork(python: str, number: signal.Signals) -> None:
    def heed() -> None:
        if number != signal.SIGKILL:  # a shell's background jobs ignore some
            signal.signal(number, signal.SIG_DFL)

    command = [python, "-c", SLEEP]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, preexec_fn=heed) as client:  # noqa: PLW1509 - this process has one thread
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        forks = children_of_server()
        assert forks
        client.send_signal(number)
        assert client.wait(30) in (-number, 1)  # 1: KeyboardInterrupt
    assert not psutil.wait_procs(forks, timeout=30)[1]


def test_signals_of_a_job_scheduler_reach_the_fork_alone(python: str) -> None:
    """They go to every process of a run: server, attendant, client and fork."""
    code = (
        "import os, signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1):\n"
        "    signal.signal(number, lambda n, f: os.write(1, b'%d\\n' % n))\n"
        "print('started', flush=True)\n"
        "for _ in range(40): time.sleep(0.1)"
    )
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "started\n"
        (server,) = servers()
        (attendant,) = server.children()
        for process in (server, attendant):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGUSR1)
        client.send_signal(signal.SIGUSR1)
        assert client.stdout.readline() == f"{signal.SIGUSR1:d}\n"
        client.send_signal(signal.SIGTERM)
        assert client.stdout.readline() == f"{signal.SIGTERM:d}\n"
        client.kill()


def test_a_signal_right_after_the_start_reaches_the_fork(python: str) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda n, f: os.write(1, b'received\\n'))\n"
        "print('started', flush=True)\n"
        "for _ in range(40): time.sleep(0.1)"
    )
    # All at once: a busy machine delays the clients.
    clients = [subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(12)]
    lines = []
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == "started\n"
        client.send_signal(signal.SIGUSR1)
        lines.append(client.stdout.readline())
        client.kill()
        client.communicate()
    assert lines == ["received\n"] * len(clients)


def test_a_signal_before_the_start_ends_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with fork_server(tmp_path, ["slow"]):
        client = subprocess.Popen([os.environ[VARIABLE], "-c", "pass"])
        time.sleep(0.5)
        client.terminate()
        assert client.wait(10) == -signal.SIGTERM


def test_blocked_and_ignored_signals_and_limits_are_those_of_the_caller(python: str) -> None:
    def limit() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    code = (
        "import resource, signal\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGUSR1},\n"
        "    signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert run(python, "-c", code, preexec_fn=limit).stdout == "True True 200\n"


def test_code_is_compiled_as_python_compiles_it(python: str, tmp_path: Path) -> None:
    assert run(python, "-c", "def f(x: Undefined): pass").returncode == 1, "annotations are evaluated"
    script = tmp_path / "latin.py"
    script.write_bytes("# coding: latin-1\nimport sys\nsys.stderr.write('\xe9')\nprint(sys.path[0])".encode("latin-1"))
    done = run(python, str(script), env={"LC_ALL": "C", "PATH": os.environ["PATH"]})
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")


def test_a_process_without_standard_input_runs(python: str) -> None:
    command = f"{python} -c 'import sys; print(sys.stdin)' <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout == "None\n"


def test_the_resource_tracker_is_no_fork(python: str) -> None:
    done = run(python, "-c", "import sys, multiprocessing.resource_tracker; print('decimal' in sys.modules)")
    assert done.stdout == "False\n", "it would end with the server, before it has removed what others left"


def test_without_the_right_to_execute_files_no_server_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with fork_server(tmp_path, []):
        assert VARIABLE not in os.environ
    monkeypatch.undo()
    monkeypatch.delenv(VARIABLE, raising=False)
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with fork_server(folder, []):
        assert VARIABLE not in os.environ


def test_a_fork_ends_with_the_parent_of_its_client(python: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([{python!r}, '-c', {SLEEP!r}])"],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    forks = children_of_server()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert not psutil.wait_procs(forks, timeout=30)[1]


def test_forks_end_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with fork_server(tmp_path, []):
        python = os.environ[VARIABLE]
        client = subprocess.Popen([python, "-c", SLEEP], stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        forks = children_of_server()
    assert client.wait(30) == -signal.SIGKILL
    client.stdout.close()
    assert not psutil.wait_procs(forks, timeout=30)[1]
    assert VARIABLE not in os.environ
    assert run(python, "-c", "print('without a server')").stdout == "without a server\n"


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["starts", "serves or imports"])
@pytest.mark.parametrize("text", ["", "import time; time.sleep(60)"])
def test_a_server_ends_with_the_process_that_started_it(text: str, seconds: float, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(text)
    code = (
        "import time\n"
        "from pathlib import Path\n"
        "from vlmrl.system.fork_server import fork_server\n"
        f"with fork_server(Path({str(tmp_path)!r}), ['slow']):\n"
        "    print('started', flush=True)\n"
        "    time.sleep(60)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = str(tmp_path)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"started\n"
        (server,) = psutil.Process(owner.pid).children()
        time.sleep(seconds)
        owner.kill()
    assert not psutil.wait_procs([server], timeout=10)[1]


@pytest.mark.parametrize(
    "text", ["1 / 0", "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"]
)
def test_where_the_server_cannot_fork_its_command_is_plain_python(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "unfit.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with fork_server(tmp_path, ["unfit"]):
        done = run(os.environ[VARIABLE], "-c", "import sys; print('unfit' in sys.modules)")
    assert (done.stdout, done.returncode) == ("False\n", 0)
    assert ("ZeroDivisionError" if text == "1 / 0" else "started 1 threads") in (
        tmp_path / "fork_server.log"
    ).read_text()


def test_the_end_of_a_server_that_was_killed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with fork_server(tmp_path, []):
        assert run(os.environ[VARIABLE], "-c", "pass").returncode == 0
        (server,) = servers()
        server.kill()
        end = time.monotonic() + 10
        while server.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
            time.sleep(0.01)
    (message,) = caplog.messages
    assert message.startswith(
        "the fork server was killed by signal 9 (SIGKILL) (it wrote no reason): its workers ended"
    )


@pytest.mark.parametrize("flags", [["-O"], ["-m", "json.tool", "--help"], ["--version"]])
def test_other_calls_of_python_are_left_to_it(python: str, flags: list[str]) -> None:
    words = flags if len(flags) > 1 or flags == ["--version"] else [*flags, "-c", "print(__debug__)"]
    done = run(python, *words)
    assert done.returncode == 0
    assert flags != ["-O"] or done.stdout == "False\n"


def test_nothing_is_started_twice_on_gpus_or_for_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    with fork_server(tmp_path, []):
        assert os.environ[VARIABLE] == sys.executable
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with fork_server(tmp_path, []):
        assert VARIABLE not in os.environ
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    with fork_server(tmp_path, []):
        assert VARIABLE not in os.environ
    assert not list(tmp_path.iterdir())


def test_threads_of_a_fork_are_those_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with fork_server(tmp_path, ["torch", "torch._dynamo"]):
        code = "import torch, torch._dynamo; print(torch.get_num_threads(), torch._dynamo.config.disable)"
        variables = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        one = run(os.environ[VARIABLE], "-c", code, env=variables)
        two = run(
            os.environ[VARIABLE], "-c", code, env=variables | {"OMP_NUM_THREADS": "2", "TORCH_COMPILE_DISABLE": "0"}
        )
    assert (one.stdout, two.stdout) == ("1 True\n", "2 False\n")


def test_a_folder_where_no_program_runs_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    for _ in range(2):
        with fork_server(tmp_path, []):
            assert VARIABLE not in os.environ
    assert caplog.messages == [f"no fork server, so workers start slowly: {tmp_path} is mounted with noexec"]
