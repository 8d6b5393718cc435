import asyncio
import base64
import io
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image
from rewards.responses import Picture, group
from rewards.reward_server import serving

from vlmrl.config.reward import Reward
from vlmrl.config.serve import Serve
from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards.function_worker import RewardResult
from vlmrl.rewards.pool import stop_forkserver
from vlmrl.rewards.protocol import RewardRequest
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.rewards.server import FunctionScorer, Scorer, check_token, listen, make_app

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


pytestmark = pytest.mark.anyio


class Lengths:
    """Scores a response by its number of characters after a delay; fails on `bug`."""

    wants_images = False

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.batches: list[int] = []
        self._is_busy = False

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        assert not self._is_busy, "called twice at once"
        self._is_busy = True
        self.batches.append(len(requests))
        await asyncio.sleep(self.delay_s)
        self._is_busy = False
        if any(request.response == "bug" for request in requests):
            raise IndexError("list index\nout of range")
        return [RewardResult(float(len(request.response))) for request in requests]


def served(scorer: Scorer, *, token: str | None = None, **settings: Any) -> AbstractAsyncContextManager[str]:
    """The URL of a real server."""
    return serving(make_app(scorer, Serve(**settings), token))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "served.py"
    path.write_text(FUNCTIONS)
    return path


def function(file: Path, name: str, **weights: float) -> FunctionScorer:
    return FunctionScorer(weights, f"{file}:{name}", num_workers=2, time_limit_s=5.0)


def client(*urls: str, token: str = "", **settings: Any) -> Rewarder:
    return Rewarder(Reward.model_validate({"remote_url": urls, "remote_retries": 1} | settings), token=token)


async def send(method: str, url: str, **content: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=10) as http:
        return await http.request(method, url, **content)


async def ask(url: str, *responses: str, **more: Any) -> httpx.Response:
    return await send("POST", url, json={"responses": responses, **more})


async def test_a_served_function_gives_the_same_rewards(file: Path) -> None:
    groups = [group("a", "bcd"), group("ef")]
    async with function(file, "length") as scorer, served(scorer) as url, client(url) as scoring:
        far = await scoring.score(groups)
    async with Rewarder(Reward(remote_url=f"{file}:length")) as rewarder:
        at_home = await rewarder.score(groups)
    assert [[s.total for s in row] for row in far] == [[s.total for s in row] for row in at_home] == [[1, 3], [2]]
    assert far[0][1].parts == {"remote": 3.0, "remote/length": 3.0, "remote/length_first": 98.0}


async def test_several_functions_are_served_as_their_weighted_sum(file: Path) -> None:
    async with function(file, "length", exact=10.0) as scorer, served(scorer) as url:
        reply = (await ask(url + "/get_reward", "7", "no", labels=["7", "7"])).json()
    assert reply["rewards"] == [11.0, 2.0]
    assert reply["extra_logs"]["exact"] == [1.0, 0.0]


async def test_a_served_function_sees_images(file: Path) -> None:
    pictures = [group("x", "y", media=(Picture(),))]
    async with function(file, "pixel") as scorer, served(scorer) as url:
        async with client(url, remote_images="data") as scoring:
            assert [s.total for s in (await scoring.score(pictures))[0]] == [3.0, 3.0]
        refusal = await ask(url, "x", images=[["c0ffee"]])
    assert (refusal.status_code, refusal.text) == (
        422,
        "image c0ffee is not in media: set reward.remote_images to data",
    )


async def test_an_unscorable_response_fails_alone_with_a_reason(file: Path) -> None:
    async with function(file, "picky", exact=1.0) as scorer, served(scorer) as url:
        reply = (await ask(url, "7", "bad", "8", labels=["7", "7", None])).json()
        async with client(url, max_failed_fraction=0.5) as scoring:
            assert [s.failure for s in (await scoring.score([group("bad", "7")]))[0]] == ["response", None]
    assert reply["rewards"] == [2.0, None, None]
    assert reply["failures"] == [None, "response", "infrastructure"]
    assert reply["problems"][1].startswith("ValueError: no idea (")
    assert (
        reply["problems"][2]
        == "response 2 of the request has no label, and the reward function exact compares with one"
    )


async def test_concurrent_responses_are_scored_together() -> None:
    scorer = Lengths(delay_s=0.05)
    async with served(scorer, max_batch=4, max_wait_ms=200) as url:
        replies = await asyncio.gather(*(ask(url, "x" * n) for n in range(8)))
        assert [reply.json()["rewards"] for reply in replies] == [[float(n)] for n in range(8)]
        assert len(scorer.batches) <= 4
        assert (await ask(url, *["x"] * 11)).json()["rewards"] == [1.0] * 11
    assert sum(scorer.batches) == 19
    assert max(scorer.batches) == 4


async def test_a_full_queue_refuses_requests_and_keeps_working() -> None:
    async with served(Lengths(delay_s=0.3), max_batch=1, max_queue=2, max_wait_ms=0) as url:
        replies = await asyncio.gather(*(ask(url, "x") for _ in range(8)))
        statuses = sorted(reply.status_code for reply in replies)
        assert set(statuses) == {200, 503}
        full = next(reply for reply in replies if reply.status_code == 503)
        assert full.text == "serve.max_queue 2 responses wait already: try again later"
        assert full.headers["Retry-After"] == "1"
        assert (await ask(url, "x")).status_code == 200
        refusal = await ask(url, "x", "y", "z")
        assert (refusal.status_code, refusal.text) == (
            413,
            "3 responses in one request: serve.max_queue lets 2 wait",
        )


async def test_a_client_retries_after_a_full_queue() -> None:
    async with (
        served(Lengths(delay_s=0.1), max_batch=1, max_queue=2, max_wait_ms=0) as url,
        client(url, remote_batch_size=1, remote_retries=6, max_failed_fraction=0.0) as scoring,
    ):
        assert [s.total for s in (await scoring.score([group(*["x"] * 6)]))[0]] == [1.0] * 6


async def test_responses_of_disconnected_clients_are_not_scored() -> None:
    scorer = Lengths(delay_s=1.5)
    async with served(scorer, max_batch=1, max_wait_ms=1) as url:
        async with httpx.AsyncClient(timeout=0.3) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(url, json={"responses": ["a", "b", "c", "d"]})
        await asyncio.sleep(1.0)
        assert (await ask(url, "new")).json()["rewards"] == [3.0]
    # The request in progress, and the one with a waiting client.
    assert scorer.batches == [1, 1]


async def test_stopped_functions_are_not_called_for_waiting_responses(file: Path) -> None:
    requests = [RewardRequest("a", "?", str(number)) for number in range(6)]
    async with FunctionScorer({}, f"{file}:slow", num_workers=1, time_limit_s=5.0) as scorer:
        scoring = asyncio.create_task(scorer.score(requests))
        await asyncio.sleep(0.3)
        await scorer.close()
        with pytest.raises(RewardError, match="were stopped while responses waited"):
            await asyncio.wait_for(scoring, timeout=5)


async def test_a_failing_scorer_is_a_500_and_the_server_keeps_running() -> None:
    async with served(Lengths()) as url:
        reply = await ask(url, "bug")
        assert (reply.status_code, reply.text) == (500, "IndexError: list index out of range")
        assert (await ask(url, "x")).json()["rewards"] == [1.0]


class Lost(Lengths):
    """A scorer with a missing file."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        raise FileNotFoundError(2, "No such file or directory", "/srv/ann/secret-project/labels.json")


async def test_no_error_shows_clients_paths(file: Path) -> None:
    async with served(Lost()) as url:
        reply = await ask(url, "x")
        assert reply.status_code == 500
        assert "No such file or directory: '.../labels.json'" in reply.text
    async with function(file, "lost") as scorer, served(scorer) as url:
        (problem,) = (await ask(url, "x")).json()["problems"]
        assert "labels.json" in problem
        assert "served.py" in problem
        for part in ("ann", "secret-project", *file.parent.parts[1:]):
            assert part not in problem


async def test_a_missing_body_times_out(file: Path) -> None:
    async with served(Lengths(), body_timeout_s=0.3) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        reply = (await asyncio.wait_for(reader.read(), timeout=5)).decode()  # until the server closes
        writer.close()
        assert reply.startswith("HTTP/1.1 408 ")
        assert "not complete after serve.body_timeout_s 0.3" in reply
        assert (await ask(url, "x")).json()["rewards"] == [1.0]


async def test_a_function_sees_only_passed_secrets(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HF_TOKEN": "h", "MY_API_KEY": "k"}.items():
        monkeypatch.setenv(name, value)
    request = RewardRequest(source="row 1", prompt="", response="x")
    for passed, sees in (((), 0.0), (("MY_API_KEY",), 1.0)):
        stop_forkserver()  # an earlier one would have the earlier environment
        async with FunctionScorer({}, f"{file}:secretive", num_workers=1, time_limit_s=5.0, pass_env=passed) as scorer:
            (result,) = await scorer.score([request])
        assert (result.parts["secretive/hub"], result.parts["secretive/mine"]) == (0.0, sees)
    assert os.environ["HF_TOKEN"] == "h"
    monkeypatch.delenv("MY_API_KEY")
    with pytest.raises(ConfigError, match=r"reward\.pass_env: the environment has no variable MY_API_KEY"):
        FunctionScorer({}, f"{file}:secretive", num_workers=1, time_limit_s=5.0, pass_env=("MY_API_KEY",))


async def test_a_bad_request_gets_a_reason() -> None:
    async with served(Lengths()) as url:
        reply = await send("POST", url, content=b"{")
        assert (reply.status_code, reply.text) == (422, "the request is not JSON")
        assert (await ask(url, "x", labels=[])).status_code == 422
        assert (await send("GET", url)).status_code == 405
        assert (await send("GET", url + "/docs")).status_code == 404


async def test_images_of_a_request_are_limited_in_total(file: Path) -> None:
    one_bit = io.BytesIO()
    Image.new("1", (800, 800)).save(one_bit, "PNG")
    url_of_image = "data:image/png;base64," + base64.b64encode(one_bit.getvalue()).decode()
    media = {str(number): url_of_image for number in range(8)}
    async with function(file, "pixel") as scorer, served(scorer, max_request_pixels=1_000_000) as url:
        reply = await ask(url, "x", images=[list(media)], media=media)
        assert (reply.status_code, reply.text) == (
            413,
            "the images have more than 1000000 pixels in total: send fewer, or raise serve.max_request_pixels",
        )
        assert (await ask(url, "x", images=[["0"]], media={"0": url_of_image})).json()["rewards"] == [0.0]
    assert Serve().max_request_pixels < 8 * 89_478_485


async def test_a_request_without_responses_does_not_wait() -> None:
    async with served(Lengths(), max_wait_ms=60_000, max_batch=2) as url:
        assert (await ask(url)).json()["rewards"] == []
        assert (await send("GET", url + "/health")).json() == {"status": "ok", "waiting": 0}


async def test_the_token_is_required_except_for_health() -> None:
    async with served(Lengths(), token="s3cret") as url:
        assert (await send("GET", url + "/health")).status_code == 200
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            reply = await send("POST", url, json={"responses": ["x"]}, headers=headers)
            assert (reply.status_code, reply.text) == (401, "send Authorization: Bearer and the server's token")
        async with client(url, token="s3cret") as scoring:
            assert (await scoring.score([group("abc")]))[0][0].total == 3.0
        for wrong in ("", "s3cret2"):
            with pytest.raises(ConfigError, match=r"refuses the token .*: set VLMRL_RM_TOKEN to") as error:
                await client(url, token=wrong).start()
            assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_server_for_others_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^serve\.host .*set the environment variable VLMRL_RM_TOKEN"):
        check_token(host, None)
    check_token(host, "s3cret")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_server_of_this_machine_needs_none(host: str) -> None:
    check_token(host, None)


def test_an_unavailable_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^serve\.host 127\.0\.0\.1, serve\.port {port}: cannot listen there: "):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen there"):
        listen("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="cannot listen there"):
        listen("127.0.0.1", 70_000)


async def test_a_stopping_server_replies_first_and_leaves_nothing_behind(file: Path) -> None:
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
        while not _replies(url) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        reply = asyncio.create_task(ask(url, "x"))
        await asyncio.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        assert (await reply).json()["rewards"] == [1.0]
        assert server.wait(timeout=20) == 0
    assert not _replies(url)


def test_a_stopping_server_ends_within_its_limit(file: Path) -> None:
    words = ["--reward.remote_url", f"{file}:endless", "--reward.time_limit_s", "1000", "--serve.stop_grace_s", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "VLMRL_RM_TOKEN"}
    command = [sys.executable, "-m", "vlmrl", "serve-rm", "--serve.port", "0", *words]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, text=True) as server,
        ExitStack() as stack,
    ):
        assert server.stdout is not None
        assert server.stderr is not None
        host, port = server.stdout.readline().rpartition("//")[2].split(":")
        # One client never sends its body, one waits for a hanging function, one sends nothing.
        body = b'{"responses": ["x"]}'
        clients = []
        for length, sent in ((100, b"{"), (len(body), body), (0, None)):
            clients.append(stack.enter_context(_connected(host, int(port))))
            if sent is not None:
                clients[-1].sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (length, sent))
        time.sleep(0.5)
        family = psutil.Process(server.pid).children(recursive=True)
        assert family
        server.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert server.wait(timeout=30) == 0
        assert time.monotonic() - started < 8
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
        assert "Traceback" not in server.stderr.read()
        for waiting in clients[:2]:
            assert waiting.recv(1000).startswith(b"HTTP/1.1 503 ")


def test_a_second_signal_ends_a_server_without_a_traceback(file: Path) -> None:
    words = ["--reward.remote_url", f"{file}:endless", "--reward.time_limit_s", "1000", "--serve.port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "VLMRL_RM_TOKEN"}
    command = [sys.executable, "-m", "vlmrl", "serve-rm", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, text=True) as server:
        assert server.stdout is not None
        host, port = server.stdout.readline().strip().rpartition("//")[2].split(":")
        with _connected(host, int(port)) as client:
            body = b'{"responses": ["x"]}'
            client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            time.sleep(0.5)
            for _ in range(2):
                server.send_signal(signal.SIGINT)
                time.sleep(0.5)
            _, errors = server.communicate(timeout=20)
        assert (server.returncode, errors) == (130, "vlmrl: interrupted\n")


def test_a_client_that_does_not_send_its_headers_loses_its_connection(file: Path) -> None:
    words = ["--reward.remote_url", f"{file}:length", "--serve.port", "0", "--serve.body_timeout_s", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "VLMRL_RM_TOKEN"}
    command = [sys.executable, "-m", "vlmrl", "serve-rm", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as server, ExitStack() as stack:
        stack.callback(server.kill)
        assert server.stdout is not None
        host, port = server.stdout.readline().strip().rpartition("//")[2].split(":")
        silent, slow = (stack.enter_context(_connected(host, int(port))) for _ in range(2))
        started = time.monotonic()
        with suppress(ConnectionError):
            for letter in b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n":
                slow.send(bytes([letter]))
                time.sleep(0.1)
                if slow in select.select([slow], [], [], 0)[0]:
                    break
        assert 0.5 < time.monotonic() - started < 3
        assert (slow.recv(100), silent.recv(100)) == (b"", b"")
        assert _replies(f"http://{host}:{port}")
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=20) == 0


async def test_the_headers_of_every_request_of_a_connection_have_a_deadline_and_nothing_else_has() -> None:
    scorer, body = Lengths(delay_s=0.8), b'{"responses": ["abc"]}'
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with serving(make_app(scorer, Serve(), None), headers_timeout_s=0.4) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(request[:-5])
            await asyncio.sleep(0.6)
            writer.write(request[-5:])
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout=5)
            assert b"3.0" in await reader.read(1000)
        started = time.monotonic()
        writer.write(b"P")
        assert await asyncio.wait_for(reader.read(), timeout=5) == b""
        assert 0.3 < time.monotonic() - started < 2
        writer.close()


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _replies(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False
