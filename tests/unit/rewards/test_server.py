import base64
import concurrent.futures
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image
from rewards.answers import Picture, group
from rewards.reward_server import serving

from vlmrl.config.reward import Reward
from vlmrl.config.serve import Serve
from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards.local_worker import Verdict
from vlmrl.rewards.pool import stop_forkserver
from vlmrl.rewards.question import Question
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.rewards.server import FunctionJudge, Judge, check_token, listen, make_app

FUNCTIONS = """
import time

def length(response): return {"total": len(response), "first": ord(response[0])}
def pixel(response, images): return images[0].getpixel((0, 0))[2]
def slow(response):
    time.sleep(0.6)
    return 1.0
def endless(response):
    time.sleep(1000)
def secretive(response):
    import os
    return {"total": 1.0, "hub": "HF_TOKEN" in os.environ, "mine": os.environ.get("MY_API_KEY") == "k"}
def lost(response):
    open("/srv/ann/secret-project/labels.json")
def picky(response):
    if response == "bad":
        raise ValueError("no idea")
    return 1.0
"""


class Lengths:
    """An answer is worth its number of characters, some time later; `bug` breaks it."""

    wants_images = False

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.batches: list[int] = []
        self.is_closed = False
        self._is_busy = threading.Lock()

    def judge(self, questions: Sequence[Question]) -> list[Verdict]:
        assert self._is_busy.acquire(blocking=False), "asked twice at once"
        self.batches.append(len(questions))
        time.sleep(self.delay_s)
        self._is_busy.release()
        if any(question.response == "bug" for question in questions):
            raise IndexError("list index\nout of range")
        return [Verdict(float(len(question.response))) for question in questions]

    def close(self) -> None:
        self.is_closed = True


def served(judge: Judge, *, token: str | None = None, **settings: Any) -> AbstractContextManager[str]:
    """The URL of a server of ours."""
    return serving(make_app(judge, Serve(**settings), token))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "served.py"
    path.write_text(FUNCTIONS)
    return path


def function(file: Path, name: str, **weights: float) -> FunctionJudge:
    return FunctionJudge(weights, f"{file}:{name}", num_workers=2, time_limit_s=5.0)


def client(*urls: str, token: str = "", **settings: Any) -> Rewarder:
    return Rewarder(Reward.model_validate({"remote_url": urls, "remote_retries": 1} | settings), token=token)


def ask(url: str, *responses: str, **more: Any) -> httpx.Response:
    return httpx.post(url, json={"responses": responses, **more}, timeout=10)


def test_a_served_function_says_what_it_would_say_at_home(file: Path) -> None:
    groups = [group("a", "bcd"), group("ef")]
    with closing(function(file, "length")) as judge, served(judge) as url, client(url) as scoring:
        far = scoring.score(groups)
    with Rewarder(Reward(remote_url=f"{file}:length")) as rewarder:
        at_home = rewarder.score(groups)
    assert [[s.total for s in row] for row in far] == [[s.total for s in row] for row in at_home] == [[1, 3], [2]]
    assert far[0][1].parts == {"remote": 3.0, "remote/length": 3.0, "remote/length_first": 98.0}


def test_several_functions_are_served_as_their_weighted_sum(file: Path) -> None:
    with closing(function(file, "length", exact=10.0)) as judge, served(judge) as url:
        answer = ask(url + "/get_reward", "7", "no", labels=["7", "7"]).json()
    assert answer["rewards"] == [11.0, 2.0]
    assert answer["extra_logs"]["exact"] == [1.0, 0.0]


def test_a_served_function_sees_images(file: Path) -> None:
    pictures = [group("x", "y", media=(Picture(),))]
    with closing(function(file, "pixel")) as judge, served(judge) as url:
        with client(url, remote_images="data") as scoring:
            assert [s.total for s in scoring.score(pictures)[0]] == [3.0, 3.0]
        refusal = ask(url, "x", images=[["c0ffee"]])
    assert (refusal.status_code, refusal.text) == (
        422,
        "image c0ffee is not in media: set reward.remote_images to data",
    )


def test_what_cannot_be_scored_fails_alone_and_says_why(file: Path) -> None:
    with closing(function(file, "picky", exact=1.0)) as judge, served(judge) as url:
        answer = ask(url, "7", "bad", "8", labels=["7", "7", None]).json()
        with client(url, max_failed_fraction=0.5) as scoring:
            assert [s.failure for s in scoring.score([group("bad", "7")])[0]] == ["response", None]
    assert answer["rewards"] == [2.0, None, None]
    assert answer["failures"] == [None, "response", "infrastructure"]
    assert answer["problems"][1].startswith("ValueError: no idea (")
    assert (
        answer["problems"][2] == "answer 2 of the request has no label, and the reward function exact compares with one"
    )


def test_answers_that_come_together_are_scored_together() -> None:
    judge = Lengths(delay_s=0.05)
    with served(judge, max_batch=4, max_wait_ms=200) as url:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            replies = list(threads.map(lambda n: ask(url, *["x" * n]), range(8)))
        assert [reply.json()["rewards"] for reply in replies] == [[float(n)] for n in range(8)]
        assert len(judge.batches) <= 4
        assert ask(url, *["x"] * 11).json()["rewards"] == [1.0] * 11
    assert sum(judge.batches) == 19
    assert max(judge.batches) == 4


def test_a_full_queue_says_so_and_goes_on() -> None:
    with served(Lengths(delay_s=0.3), max_batch=1, max_queue=2, max_wait_ms=0) as url:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            replies = list(threads.map(lambda _: ask(url, "x"), range(8)))
        statuses = sorted(reply.status_code for reply in replies)
        assert set(statuses) == {200, 503}
        full = next(reply for reply in replies if reply.status_code == 503)
        assert full.text == "serve.max_queue 2 answers wait already: come back later"
        assert full.headers["Retry-After"] == "1"
        assert ask(url, "x").status_code == 200
        refusal = ask(url, "x", "y", "z")
        assert (refusal.status_code, refusal.text) == (
            413,
            "3 answers in one request: serve.max_queue lets 2 wait",
        )


def test_a_client_comes_back_to_a_full_queue() -> None:
    with (
        served(Lengths(delay_s=0.1), max_batch=1, max_queue=2, max_wait_ms=0) as url,
        client(url, remote_batch_size=1, remote_retries=6, max_failed_fraction=0.0) as scoring,
    ):
        assert [s.total for s in scoring.score([group(*["x"] * 6)])[0]] == [1.0] * 6


def test_what_nobody_waits_for_any_more_is_not_scored() -> None:
    judge = Lengths(delay_s=1.5)
    with served(judge, max_batch=1, max_wait_ms=1) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={"responses": ["a", "b", "c", "d"]}, timeout=0.3)
        time.sleep(1.0)
        assert ask(url, "new").json()["rewards"] == [3.0]
    # The one that was under way, and the one that somebody waited for.
    assert judge.batches == [1, 1]


def test_functions_that_are_stopped_while_answers_wait_are_not_called_again(file: Path) -> None:
    judge = FunctionJudge({}, f"{file}:slow", num_workers=1, time_limit_s=5.0)
    questions = [Question("a", "?", str(number)) for number in range(6)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        judged = pool.submit(judge.judge, questions)
        time.sleep(0.3)
        judge.close()
        with pytest.raises(RewardError, match="were stopped while answers waited"):
            judged.result(timeout=5)


def test_a_judge_that_breaks_answers_500_and_the_server_lives_on() -> None:
    with served(Lengths()) as url:
        reply = ask(url, "bug")
        assert (reply.status_code, reply.text) == (500, "IndexError: list index out of range")
        assert ask(url, "x").json()["rewards"] == [1.0]


class Lost(Lengths):
    """A judge that misses a file."""

    def judge(self, questions: Sequence[Question]) -> list[Verdict]:
        raise FileNotFoundError(2, "No such file or directory", "/srv/ann/secret-project/labels.json")


def test_no_error_tells_clients_where_files_lie(file: Path) -> None:
    with served(Lost()) as url:
        reply = ask(url, "x")
        assert reply.status_code == 500
        assert "No such file or directory: '.../labels.json'" in reply.text
    with closing(function(file, "lost")) as judge, served(judge) as url:
        (problem,) = ask(url, "x").json()["problems"]
        assert "labels.json" in problem
        assert "served.py" in problem
        for part in ("ann", "secret-project", *file.parent.parts[1:]):
            assert part not in problem


def test_a_body_that_does_not_come_is_given_up(file: Path) -> None:
    with served(Lengths(), body_timeout_s=0.3) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            started = time.monotonic()
            said = slow.recv(4096).decode()
            assert time.monotonic() - started < 5
            assert said.startswith("HTTP/1.1 408 ")
            assert "not whole after serve.body_timeout_s 0.3" in said + slow.recv(4096).decode()
        assert ask(url, "x").json()["rewards"] == [1.0]


def test_a_function_sees_no_secret_of_the_environment_unless_it_is_passed_on(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_TOKEN": "h", "MY_API_KEY": "k"}.items():
        monkeypatch.setenv(name, value)
    question = Question(source="row 1", prompt="", response="x", label=None, metadata={}, media=())
    for passed, sees in (((), 0.0), (("MY_API_KEY",), 1.0)):
        stop_forkserver()  # one that was started before has the environment of then
        judge = FunctionJudge({}, f"{file}:secretive", num_workers=1, time_limit_s=5.0, pass_env=passed)
        with closing(judge):
            (verdict,) = judge.judge([question])
        assert (verdict.parts["secretive/hub"], verdict.parts["secretive/mine"]) == (0.0, sees)
    assert os.environ["HF_TOKEN"] == "h"
    monkeypatch.delenv("MY_API_KEY")
    with pytest.raises(ConfigError, match=r"reward\.pass_env: the environment has no variable MY_API_KEY"):
        FunctionJudge({}, f"{file}:secretive", num_workers=1, time_limit_s=5.0, pass_env=("MY_API_KEY",))


def test_a_bad_request_is_told_what_is_wrong() -> None:
    with served(Lengths()) as url:
        reply = httpx.post(url, content=b"{")
        assert (reply.status_code, reply.text) == (422, "the request is not JSON")
        assert ask(url, "x", labels=[]).status_code == 422
        assert httpx.get(url).status_code == 405
        assert httpx.get(url + "/docs").status_code == 404


def test_images_of_a_request_that_are_small_alone_are_bounded_together(file: Path) -> None:
    one_bit = io.BytesIO()
    Image.new("1", (800, 800)).save(one_bit, "PNG")
    url_of_image = "data:image/png;base64," + base64.b64encode(one_bit.getvalue()).decode()
    media = {str(number): url_of_image for number in range(8)}
    with closing(function(file, "pixel")) as judge, served(judge, max_request_pixels=1_000_000) as url:
        reply = ask(url, "x", images=[list(media)], media=media)
        assert (reply.status_code, reply.text) == (
            413,
            "the images have more than 1000000 pixels in total: send fewer, or raise serve.max_request_pixels",
        )
        assert ask(url, "x", images=[["0"]], media={"0": url_of_image}).json()["rewards"] == [0.0]
    assert Serve().max_request_pixels < 8 * 89_478_485


def test_a_request_without_answers_is_answered_without_waiting() -> None:
    with served(Lengths(), max_wait_ms=60_000, max_batch=2) as url:
        assert ask(url).json()["rewards"] == []
        assert httpx.get(url + "/health").json() == {"status": "ok", "waiting": 0}


def test_a_token_is_asked_for_everywhere_but_at_health() -> None:
    with served(Lengths(), token="s3cret") as url:
        assert httpx.get(url + "/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            reply = httpx.post(url, json={"responses": ["x"]}, headers=headers)
            assert (reply.status_code, reply.text) == (401, "send Authorization: Bearer and the server's token")
        with client(url, token="s3cret") as scoring:
            assert scoring.score([group("abc")])[0][0].total == 3.0
        for wrong in ("", "s3cret2"):
            with pytest.raises(ConfigError, match=r"refuses the token .*: set VLMRL_RM_TOKEN to") as error:
                client(url, token=wrong)
            assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_server_for_others_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^serve\.host .*set the environment variable VLMRL_RM_TOKEN"):
        check_token(host, None)
    check_token(host, "s3cret")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_server_of_this_machine_needs_none(host: str) -> None:
    check_token(host, None)


def test_an_address_that_cannot_be_had_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^serve\.host 127\.0\.0\.1, serve\.port {port}: cannot listen there: "):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen there"):
        listen("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="cannot listen there"):
        listen("127.0.0.1", 70_000)


def test_a_server_that_is_told_to_stop_answers_first_and_leaves_nothing(file: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--reward.remote_url", f"{file}:slow", "--serve.port", str(port)]
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    environment.pop("VLMRL_RM_TOKEN", None)
    with subprocess.Popen(
        [sys.executable, "-m", "vlmrl", "serve-rm", *words], stdout=subprocess.PIPE, env=environment, text=True
    ) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{port}"
        assert server.stdout.readline() == f"vlmrl serve-rm: {url}\n"
        deadline = time.monotonic() + 10
        while not _answers(url) and time.monotonic() < deadline:
            time.sleep(0.05)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            reply = thread.submit(ask, url, "x")
            time.sleep(0.3)
            server.send_signal(signal.SIGTERM)
            assert reply.result().json()["rewards"] == [1.0]
        assert server.wait(timeout=20) == 0
    assert not _answers(url)


def test_a_server_that_is_told_to_stop_ends_within_its_limit_whatever_clients_and_functions_do(file: Path) -> None:
    words = ["--reward.remote_url", f"{file}:endless", "--reward.time_limit_s", "1000", "--serve.stop_grace_s", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "VLMRL_RM_TOKEN"}
    command = [sys.executable, "-m", "vlmrl", "serve-rm", "--serve.port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as server, ExitStack() as stack:
        assert server.stdout is not None
        host, port = server.stdout.readline().rpartition("//")[2].split(":")
        # One never sends its body, one waits for a function that never ends, one does not send anything.
        body = b'{"responses": ["x"]}'
        for length, sent in ((100, b"{"), (len(body), body), (0, None)):
            one = stack.enter_context(_connected(host, int(port)))
            if sent is not None:
                one.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (length, sent))
        time.sleep(0.5)
        family = psutil.Process(server.pid).children(recursive=True)
        assert family
        server.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert server.wait(timeout=30) == 0
        assert time.monotonic() - started < 8
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False
