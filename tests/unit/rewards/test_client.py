import asyncio
import base64
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rewards.responses import Picture, group
from rewards.reward_server import Asked, Reply, lengths, server

from vlmrl.config.reward import Reward
from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards.client import checked
from vlmrl.rewards.rewarder import Rewarder, check_functions
from vlmrl.types import Group, Score

pytestmark = pytest.mark.anyio


def rewarder(*urls: str, **settings: Any) -> Rewarder:
    given = {"remote_url": urls, "remote_timeout_s": 5.0, "remote_retries": 1} | settings
    return Rewarder(Reward.model_validate(given), token="")


def totals(scores: list[list[Score]]) -> list[list[float]]:
    return [[score.total for score in row] for row in scores]


def failing(*rewards: object, **more: object) -> Reply:
    return lambda number, asked: (200, json.dumps({"rewards": rewards} | more).encode())


@contextmanager
def nobody() -> Iterator[str]:
    """The URL of a reserved port without a listener."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{closed.getsockname()[1]}/score"


async def test_a_server_gets_all_fields_and_returns_the_rewards() -> None:
    with server() as seen:
        async with rewarder(seen.url, remote_weight=0.5) as scoring:
            scores = await scoring.score([group("a", "bcd")])
    assert [(s.total, dict(s.parts)) for s in scores[0]] == [(0.5, {"remote": 1.0}), (1.5, {"remote": 3.0})]
    asked = {key: [v for request in seen.requests for v in request[key]] for key in seen.requests[0]}
    question = {"role": "user", "content": "how many?"}
    assert asked == {
        "query": ["how many?a", "how many?bcd"],
        "prompts": ["how many?"] * 2,
        "responses": ["a", "bcd"],
        "labels": ["7", "7"],
        "metadata": [{"family": "x"}] * 2,
        "images": [[], []],
        "messages": [[question, {"role": "assistant", "content": text}] for text in ("a", "bcd")],
        "num_prompt_messages": [None, None],
    }


async def test_built_in_functions_work_beside_a_server() -> None:
    with server() as seen:
        async with rewarder(seen.url, functions={"exact": 2.0}, remote_weight=-0.25) as scoring:
            scores = await scoring.score([group("7", "no"), group("77")])
    assert totals(scores) == [[1.75, -0.5], [-0.5]]
    assert scores[0][0].parts == {"exact": 1.0, "remote": 1.0}


async def test_requests_hold_at_most_a_batch_and_scores_keep_their_order() -> None:
    groups = [group(*("x" * (10 * i + j) for j in range(7))) for i in range(5)]
    with server(delay_s=0.02) as seen:
        async with rewarder(seen.url, remote_batch_size=4) as scoring:
            for begun in groups:
                await scoring.begin(begun)
            scores = await scoring.score(list(reversed(groups)))
    assert totals(scores) == [[float(10 * i + j) for j in range(7)] for i in reversed(range(5))]
    sizes = [len(request["responses"]) for request in seen.requests]
    assert sum(sizes) == 35
    assert max(sizes) == 4
    assert len(sizes) < 20


async def test_servers_of_one_reward_share_the_work() -> None:
    with server(delay_s=0.05) as first, server(delay_s=0.05) as other:
        async with rewarder(first.url, other.url, remote_batch_size=2) as scoring:
            assert totals(await scoring.score([group(*"abcdefghijklmnopqrst")])) == [[1.0] * 20]
    counts = [sum(len(request["responses"]) for request in seen.requests) for seen in (first, other)]
    assert sum(counts) == 20
    assert min(counts) >= 6


async def test_one_server_takes_over_from_another_that_is_down() -> None:
    with nobody() as down, server() as up:
        async with rewarder(down, up.url, remote_retries=0, max_failed_fraction=0.0) as scoring:
            for _ in range(3):
                assert totals(await scoring.score([group("a", "bb", "ccc")])) == [[1.0, 2.0, 3.0]]


async def test_a_hanging_server_is_replaced_by_another_and_then_avoided() -> None:
    with server(delay_s=1.5) as slow, server() as fast:
        async with rewarder(
            slow.url, fast.url, remote_timeout_s=0.3, remote_retries=0, max_failed_fraction=0.0
        ) as scoring:
            assert totals(await scoring.score([group("a"), group("bb")])) == [[1.0], [2.0]]
            start = time.monotonic()
            for _ in range(3):
                assert totals(await scoring.score([group("a")])) == [[1.0]]
            assert time.monotonic() - start < 0.6


async def test_missing_servers_are_reported_at_the_start() -> None:
    with nobody() as down, pytest.raises(ConfigError) as error:
        await rewarder(down).start()
    assert str(error.value).startswith(f"reward.remote_url: {down} does not reply: ")
    assert str(error.value).endswith("start it (vlmrl serve-rm), or correct the address")
    assert "\n" not in str(error.value)


def test_servers_need_not_be_up_unless_used() -> None:
    with nobody() as down:
        reward = Reward(remote_url=down, functions={"exact": 1.0})
        check_functions(reward, asks_servers=False)
        with pytest.raises(ConfigError, match="does not reply"):
            check_functions(reward)


@pytest.mark.parametrize("url", ["http://", "http://[::1", "https:///score"])
def test_an_invalid_url_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.remote_url: "):
        rewarder(url)


async def test_a_server_that_goes_down_stops_the_run_with_the_reason() -> None:
    with server() as seen:
        scoring = rewarder(seen.url)
        await scoring.start()
        assert totals(await scoring.score([group("a")])) == [[1.0]]
    with pytest.raises(RewardError) as error:
        await scoring.score([group("a", "b")])
    await scoring.close()
    assert "1 of 2 responses could not be scored" in str(error.value)
    assert f"{seen.url} does not reply: " in str(error.value)
    assert "(the last of 2 tries), on shapes:17" in str(error.value)
    assert "\n" not in str(error.value)


async def test_responses_without_a_server_are_failures_of_the_infrastructure() -> None:
    with server() as seen:
        scoring = rewarder(seen.url, remote_retries=0, max_failed_fraction=1.0)
        await scoring.start()
    (score,) = (await scoring.score([group("a")]))[0]
    await scoring.close()
    assert (score.total, score.failure) == (0.0, "infrastructure")


async def test_a_slow_server_gets_a_retry_before_its_responses_fail() -> None:
    with server(delay_s=0.8) as seen:
        async with rewarder(seen.url, remote_timeout_s=0.2) as scoring:
            with pytest.raises(
                RewardError,
                match=r"takes longer than 0\.2 s, reward\.remote_timeout_s: raise it, .* \(the last of 2 tries\)",
            ):
                await scoring.score([group("a")])
    assert len(seen.requests) == 2


async def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for() -> None:
    def drip(listener: socket.socket) -> None:
        listener.accept()[0].close()  # the check at the start
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(60):
                time.sleep(0.05)
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener, server() as other:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        start = time.monotonic()
        async with rewarder(url, other.url, remote_timeout_s=0.3, remote_retries=0) as scoring:
            scores = await scoring.score([group("a")])
        assert totals(scores) == [[1.0]]
        assert time.monotonic() - start < 0.9  # of the 1 s that the server drips
        thread.join()


async def test_a_transient_error_costs_nothing() -> None:
    def once(number: int, asked: Asked) -> tuple[int, bytes]:
        return (500, b"out of memory") if number == 0 else lengths(number, asked)

    with server(once) as seen:
        async with rewarder(seen.url, max_failed_fraction=0.0) as scoring:
            assert totals(await scoring.score([group("a")])) == [[1.0]]
    assert len(seen.requests) == 2


async def test_a_persistent_error_has_the_servers_reason() -> None:
    with server(lambda *_: (500, b"out of\n memory")) as seen:
        async with rewarder(seen.url, remote_retries=0) as scoring:
            with pytest.raises(RewardError, match=r"replied with status 500: out of memory, on shapes:17$"):
                await scoring.score([group("a")])


@pytest.mark.parametrize("status", [307, 400, 404, 413, 422])
async def test_a_request_that_would_fail_again_is_not_repeated(status: int) -> None:
    with server(lambda *_: (status, b"no")) as seen:
        async with rewarder(seen.url, remote_retries=3) as scoring:
            with pytest.raises(RewardError, match=f"replied with status {status}: no"):
                await scoring.score([group("a")])
    assert len(seen.requests) == 1


async def test_one_server_takes_over_from_another_that_refuses() -> None:
    with server(lambda *_: (404, b"no such path")) as lost, server() as fine:
        async with rewarder(lost.url, fine.url, max_failed_fraction=0.0) as scoring:
            start = time.monotonic()
            assert totals(await scoring.score([group(*"abcdefgh")])) == [[1.0] * 8]
            assert time.monotonic() - start < 1.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>busy</html>", "replied with what is not JSON: <html>busy</html>"),
        (b"\xff\xfe", "replied with what is not JSON"),
        (b"[" * 100_000, "replied with what is not JSON"),
        (b"", "replied with what is not JSON"),
        (b"[1.0, 2.0]", 'replied without "rewards"'),
        (b'{"scores": [1.0, 2.0]}', 'replied without "rewards"'),
        (b'{"rewards": 1.0}', 'replied with "rewards" that are no list but a float'),
        (b'{"rewards": [1.0]}', 'replied with 1 "rewards" for 2 responses'),
        (b'{"rewards": [1.0, 2.0, 3.0]}', 'replied with 3 "rewards" for 2 responses'),
        (b'{"rewards": [1.0, 2.0], "extra_logs": {"a": [1.0]}}', 'replied with 1 "a" for 2 responses'),
        (b'{"rewards": [1.0, 2.0], "extra_logs": [1.0]}', '"extra_logs" that are no object but a list'),
    ],
)
async def test_an_invalid_reply_fails_the_whole_request_with_its_text(body: bytes, message: str) -> None:
    with server(lambda *_: (200, body)) as seen:
        async with rewarder(seen.url, remote_retries=0) as scoring:
            with pytest.raises(RewardError) as error:
                await scoring.score([group("a", "b")])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


async def test_an_endless_reply_does_not_fill_the_memory() -> None:
    with server(lambda *_: (200, b" " * (65 << 20))) as seen:
        async with rewarder(seen.url, remote_retries=0) as scoring:
            with pytest.raises(RewardError, match="replied with more than 67108864 bytes"):
                await scoring.score([group("a")])


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("NaN", "it returned nan, which is not a finite number"),
        ("Infinity", "it returned inf, which is not a finite number"),
        ("1e999", "it returned inf, which is not a finite number"),
        ("null", "the server gave no reward and no reason"),
        ('"1"', "it returned a str of 1 where one number per response is expected"),
        ("[1.0]", "it returned a list of 1 where one number per response is expected"),
    ],
)
async def test_an_invalid_number_fails_that_response_alone(number: str, message: str) -> None:
    def reply(_: int, asked: Asked) -> tuple[int, bytes]:
        rewards = [number if response == "bad" else "2.5" for response in asked["responses"]]
        return 200, f'{{"rewards": [{", ".join(rewards)}]}}'.encode()

    responses = group("good", "bad", "good")
    with server(reply) as seen:
        async with rewarder(seen.url, max_failed_fraction=0.5) as scoring:
            (scores,) = await scoring.score([responses])
        assert [(s.total, s.failure) for s in scores] == [(2.5, None), (0.0, "response"), (2.5, None)]
        async with rewarder(seen.url, max_failed_fraction=0.0) as scoring:
            with pytest.raises(RewardError, match=message):
                await scoring.score([group("bad", "bad")])


async def test_reason_and_other_numbers_of_the_server_are_passed_on() -> None:
    def reply(_: int, asked: Asked) -> tuple[int, bytes]:
        bad = [response == "bad" for response in asked["responses"]]
        return 200, json.dumps(
            {
                "rewards": [None if b else 1.0 for b in bad],
                "problems": ["too\nlong" if b else None for b in bad],
                "extra_logs": {"style": [None if b else 0.5 for b in bad]},
            }
        ).encode()

    with server(reply) as seen:
        async with rewarder(seen.url, max_failed_fraction=0.5) as scoring:
            good, bad = (await scoring.score([group("good", "bad")]))[0]
        assert (good.total, dict(good.parts)) == (1.0, {"remote": 1.0, "remote/style": 0.5})
        assert (bad.failed, dict(bad.parts)) == (True, {})
        async with rewarder(seen.url, max_failed_fraction=0.0) as scoring:
            with pytest.raises(RewardError, match="too long, on"):
                await scoring.score([group("bad")])


async def test_images_are_sent_not_at_all_as_hashes_or_once_as_data() -> None:
    groups = [group("a", "b", media=(Picture(), Picture())), group("c")]
    sent: dict[str, list[Asked]] = {}
    for images in ("none", "hash", "data"):
        with server() as seen:
            async with rewarder(seen.url, remote_images=images) as scoring:
                await scoring.score(groups)
        sent[images] = seen.requests
    assert all(request["images"] == [[]] * len(request["responses"]) for request in sent["none"])
    for images in ("hash", "data"):
        named: dict[str, list[str]] = {}
        for request in sent[images]:
            named |= dict(zip(request["responses"], request["images"], strict=True))
        assert named == {"a": ["c0ffee", "c0ffee"], "b": ["c0ffee", "c0ffee"], "c": []}
    assert all("media" not in request for request in [*sent["none"], *sent["hash"]])
    urls = {url for request in sent["data"] for url in request["media"].values()}
    (url,) = urls
    assert url.startswith("data:image/png;base64,")
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert np.array_equal(np.asarray(image), Picture().fetch())


async def test_begun_groups_are_scored_in_the_background() -> None:
    groups: list[Group] = [group("a", index=1), group("bb", index=2)]
    with server(delay_s=0.6) as seen:
        async with rewarder(seen.url) as scoring:
            start = time.monotonic()
            for begun in groups:
                await scoring.begin(begun)
            assert time.monotonic() - start < 0.4
            await asyncio.sleep(1.0)
            start = time.monotonic()
            assert totals(await scoring.score(groups)) == [[1.0], [2.0]]
            assert time.monotonic() - start < 0.4
    assert sum(len(request["responses"]) for request in seen.requests) == 2


async def test_the_token_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMRL_RM_TOKEN", " s3cret\n")
    reward = Reward(remote_url="http://127.0.0.1:1", remote_retries=0)
    with server(lambda *_: (500, b"no")) as seen:
        there = reward.model_copy(update={"remote_url": seen.url + "?room=hidden"})
        async with Rewarder(there) as scoring:
            with pytest.raises(RewardError) as error:
                await scoring.score([group("a")])
    assert seen.headers[0]["Authorization"] == "Bearer s3cret"
    assert all(secret not in str(error.value) for secret in ("s3cret", "hidden"))
    monkeypatch.setenv("VLMRL_RM_TOKEN", "two words")
    with pytest.raises(ConfigError, match="VLMRL_RM_TOKEN may hold") as refusal:
        Rewarder(reward)
    assert "two words" not in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cret@127.0.0.1:1",
        "http://127.0.0.1:1/score?model=a&api_key=s3cret",
        "http://127.0.0.1:1?Token=s3cret",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="set VLMRL_RM_TOKEN in the environment") as refusal:
        rewarder(url)
    assert "s3cret" not in str(refusal.value)


def test_a_url_may_have_parameters_that_are_no_secrets() -> None:
    url = "http://127.0.0.1:1/score?model=a&max_token=5&sort_key=b"
    assert checked(url) == url


async def test_cancelled_requests_are_not_sent() -> None:
    with server(delay_s=1.0) as seen:
        scoring = rewarder(seen.url)
        await scoring.start()
        await scoring.begin(group("a"))
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await scoring.close()
        await scoring.close()
        assert time.monotonic() - start < 0.5
