"""The gateway over HTTP, with the `openai` client and with clients that misbehave."""

import asyncio
import gc
import json
import logging
import threading
from typing import Any

import httpx
import openai
import pytest
from agents.gateway.scripted import CALL, ZOOM, Served, picture, served
from chat_templates import text_processor
from openai import AsyncOpenAI

from vlmrl.agents.gateway.bodies import RawMessage
from vlmrl.agents.gateway.episode import GatewayEpisode
from vlmrl.agents.gateway.images import Images
from vlmrl.agents.gateway.server import Keys, Server, make_app
from vlmrl.config.gateway import Gateway
from vlmrl.errors import ClusterError
from vlmrl.plugins import Processor

pytestmark = pytest.mark.anyio

ASK: list[Any] = [{"role": "user", "content": "Which way?"}]


@pytest.fixture(autouse=True)
def _without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def qwen() -> Processor:
    return text_processor("qwen3")


def zooms(text: str, number: int) -> str:
    """Two calls at first, then words."""
    return "It is 3." if "tool_response" in text else f"I look.\n{CALL % 1}\n{CALL % 2}"


async def ask(client: AsyncOpenAI, messages: list[Any], **settings: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **settings)


async def test_a_conversation_with_parallel_calls(qwen: Processor) -> None:
    async with served(qwen, zooms) as one:
        first = await ask(one.client(), ASK, tools=[ZOOM], logprobs=True)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls = choice.message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"x": 1}, {"x": 2}]
        tokens = one.sample.sampled[0]
        assert len(choice.logprobs.content) == len(tokens) == first.usage.completion_tokens
        assert choice.logprobs.content[0].logprob == pytest.approx(-1.0)
        assert first.usage.prompt_tokens == len(one.sample.seen[0][0].tokens)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
        second = await ask(one.client(), [*ASK, choice.message.model_dump(), *results], tools=[ZOOM])
        assert second.choices[0].message.content == "It is 3."
        assert second.choices[0].finish_reason == "stop"
        assert one.episode.counts["opened/start"] == 1
        assert one.episode.counts["tool_calls"] == 2
        (segment,) = one.episode.tree.segments()
        assert len(segment.turns) == 2
        one.check()


async def test_a_stream_has_what_was_sampled(qwen: Processor) -> None:
    async with served(qwen, zooms) as one:
        stream = await ask(one.client(), ASK, tools=[ZOOM], stream=True, stream_options={"include_usage": True}, n=2)
        chunks = [chunk async for chunk in stream]
        texts: dict[int, str] = {0: "", 1: ""}
        names: dict[int, list[str]] = {0: [], 1: []}
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                names[choice.index] += [call.function.name for call in choice.delta.tool_calls or ()]
        assert texts == {0: "I look.", 1: "I look."}
        assert names == {0: ["zoom", "zoom"], 1: ["zoom", "zoom"]}
        assert chunks[-1].usage.completion_tokens == sum(map(len, one.sample.sampled))
        assert len(one.episode.tree.delivered) == 2
        one.check()


async def test_images_of_users_and_tools(vlm: Processor) -> None:
    async with served(vlm, zooms) as one:
        question = {"role": "user", "content": [picture((255, 0, 0)), {"type": "text", "text": "Where?"}]}
        first = await ask(one.client(), [question], tools=[ZOOM])
        message = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": [picture((0, 0, place))]}
            for place, call in enumerate(message.tool_calls)
        ]
        await ask(one.client(), [question, message.model_dump(), *results], tools=[ZOOM])
        (segment,) = one.episode.tree.segments()
        assert len(segment.media) == 3
        assert len({item.hash for item in segment.media}) == 3
        assert len(one.episode._images._known) == 3
        one.check()


async def test_a_retry_joins_or_replays(qwen: Processor) -> None:
    """The client's library gives up after a moment, and sends the request again."""
    async with served(qwen, delay_s=1.0) as one:
        reply = await ask(one.client(timeout=0.4, max_retries=8), ASK)
        assert reply.choices[0].message.content == "yes"
        assert len(one.sample.sampled) == 1
        assert one.episode.counts["replayed"] >= 1
        again = await ask(one.client(), ASK)
        assert len(one.sample.sampled) == 2, "the same request without that header is another one"
        retried = {"x-stainless-retry-count": "1"}
        replayed = await ask(one.client(), ASK, extra_headers=retried)
        assert replayed.id in (reply.id, again.id)
        assert len(one.sample.sampled) == 2
        one.check()


async def test_a_reply_that_nobody_waited_for_is_dropped(qwen: Processor) -> None:
    async with served(qwen, delay_s=0.7) as one:
        for stream in (False, True):
            with pytest.raises(openai.APITimeoutError):
                async for _ in (
                    await ask(one.client(timeout=0.2), ASK, stream=True)
                    if stream
                    else _none(await ask(one.client(timeout=0.2), ASK))
                ):
                    pass
        await asyncio.sleep(1.5)
        assert len(one.sample.sampled) == 2
        assert one.episode.tree.delivered == []
        await ask(one.client(), ASK)
        one.check()
        await one.episode.close()
        assert one.episode.counts["dropped/undelivered"] == 2
        assert one.episode.counts["dropped_tokens"] == sum(map(len, one.sample.sampled[:2]))


def _none(_: Any) -> Any:
    async def nothing() -> Any:
        return
        yield

    return nothing()


async def test_seeds_do_not_depend_on_the_order_of_parallel_requests(qwen: Processor) -> None:
    seeds = []
    for names in (["a", "b", "a"], ["b", "a", "a"]):
        async with served(qwen) as one:
            for name in names:
                await ask(one.client(), [{"role": "user", "content": name}])
            seeds.append(sorted(sampling.seed for _, sampling in one.sample.seen))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


async def test_stop_and_a_smaller_length_are_honoured(qwen: Processor) -> None:
    async with served(qwen, lambda text, number: "left or right") as one:
        reply = await ask(one.client(), ASK, stop=[" or", "|"], max_completion_tokens=50, max_tokens=1000)
        assert reply.choices[0].message.content == "left"
        (_, sampling), *_ = one.sample.seen
        assert sampling.stop == (" or", "|")
        assert sampling.max_new_tokens == 50
        cut = await ask(one.client(), ASK, max_tokens=3)
        assert cut.choices[0].finish_reason == "length"
        assert one.episode.last_is_cut
        message = {"role": "assistant", "content": "left"}
        await ask(one.client(), [*ASK, message, {"role": "user", "content": "Next?"}])
        assert one.episode.counts["opened/start"] == 1
        one.check()


OTHER = {
    "temperature": 0.2,
    "top_p": 0.5,
    "seed": 3,
    "presence_penalty": 1.0,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "extra_body": {"top_k": 5, "mirostat": 2},
}


async def test_other_settings_are_overridden_and_counted(qwen: Processor) -> None:
    async with served(qwen) as one:
        await ask(one.client(), ASK, tools=[ZOOM], **OTHER)
        names = {name.partition("/")[2] for name in one.episode.counts if name.startswith("overridden/")}
        ours = {"temperature", "top_p", "seed", "presence_penalty", "tool_choice", "parallel_tool_calls"}
        assert names == ours | {"top_k", "other"}
        (_, sampling), *_ = one.sample.seen
        assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)


@pytest.mark.parametrize("name", [*OTHER])
async def test_other_settings_are_refused(qwen: Processor, name: str) -> None:
    async with served(qwen, gateway=Gateway(other_settings="refuse")) as one:
        with pytest.raises(openai.BadRequestError, match="the run samples with settings of its own"):
            await ask(one.client(), ASK, tools=[ZOOM], **{name: OTHER[name]})
        neutral = {"temperature": 1.0, "top_p": 1, "presence_penalty": 0, "parallel_tool_calls": True, "user": "me"}
        await ask(one.client(), ASK, tools=[ZOOM], tool_choice="auto", **neutral)


def nested_tool(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return {"type": "function", "function": {"name": "deep", "parameters": schema}}


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
WEB = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}


@pytest.mark.parametrize(
    ("request_body", "status", "words"),
    [
        ("{", 400, "not JSON"),
        ("[" * 100_000, 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b'{"messages": [' + b"[]," * 1_000_000 + b"[]]}", 400, "more than 2,000,000 values"),
        ("[]", 400, "a JSON object"),
        ({}, 400, "messages must be a list"),
        ({"messages": []}, 400, "messages must be a list"),
        ({"messages": ["hello"]}, 400, "messages[0] must be an object"),
        ({"messages": [{"role": "god", "content": "x"}]}, 400, "messages[0].role must be one of"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content must be text or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "type text or image_url"),
        ({"messages": [{"role": "user", "content": [WEB]}]}, 400, "images must be data URLs"),
        ({"messages": [{"role": "user", "content": [picture((1, 1, 1))]}]}, 400, "the model takes text only"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id must be text"),
        ({"messages": [*ASK, {"role": "assistant", "content": "x"}]}, 400, "nothing to respond to"),
        ({"messages": ASK, "response_format": SCHEMA}, 400, "constrained sampling"),
        ({"messages": ASK, "response_format": {"type": "json_object"}}, 400, "constrained sampling"),
        ({"messages": ASK, "guided_json": {}}, 400, "constrained sampling"),
        ({"messages": ASK, "functions": []}, 400, "use tools"),
        ({"messages": ASK, "n": 0}, 400, "n must be a whole number"),
        ({"messages": ASK, "n": 1000}, 400, "n must be a whole number, 1 to 64"),
        ({"messages": ASK, "max_tokens": "many"}, 400, "max_tokens must be a whole number"),
        ({"messages": ASK, "top_logprobs": 3}, 400, "top_logprobs is not supported"),
        ({"messages": ASK, "stop": [1]}, 400, "stop must be"),
        ({"messages": ASK, "tools": [{"type": "web"}]}, 400, "tools[0] must be a function"),
        ({"messages": ASK, "tool_choice": "sometimes"}, 400, "tool_choice must be"),
        ({"messages": ASK, "stream": "yes"}, 400, "stream must be true or false"),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, 400, "has no room"),
        ({"messages": ASK, "tools": [nested_tool(400)]}, 400, "nested too deeply"),
        (f'{{"messages": [{{"role": {"[" * 900}{"]" * 900}}}]}}', 400, "messages[0].role must be one of"),
        ({"messages": ASK, "model": "x" * 2000}, 400, "model has more than 1000 characters"),
        ({"messages": ASK, "stop": "x" * 2000}, 400, "each of at most 1000 characters"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}]}, 400, "at most 4096"),
        ({"messages": [{"role": "tool", "tool_call_id": "x" * 2_000_000}]}, 400, "has no room"),
        ({"messages": [{"role": "user", "content": "x", "name": "x" * 2_000_000}]}, 400, "has no room"),
    ],
)
async def test_nonsense_is_refused(qwen: Processor, request_body: Any, status: int, words: str) -> None:
    content = json.dumps(request_body) if isinstance(request_body, dict) else request_body
    async with served(qwen) as one, http(one) as client:
        reply = await client.post("/chat/completions", content=content)
        assert reply.status_code == status
        error = reply.json()["error"]
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"
        assert set(error) == {"message", "type", "param", "code"}
        assert (await client.post("/chat/completions", json={"messages": ASK})).status_code == 200
        one.check()


def http(one: Served, **settings: Any) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {one.key}"}
    return httpx.AsyncClient(base_url=one.base_url, headers=headers, **{"timeout": 20.0} | settings)


async def test_what_cannot_fit_is_neither_decoded_nor_tokenized(
    qwen: Processor, vlm: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[str] = []
    monkeypatch.setattr(Images, "_store", lambda *_: touched.append("images"))
    monkeypatch.setattr(GatewayEpisode, "_open", lambda *_: touched.append("text"))
    pictures = {"messages": [{"role": "user", "content": [picture((i, 0, 0)) for i in range(3)]}]}
    text = {"messages": [{"role": "user", "content": "word " * 100_000}]}
    for one_processor, body, code in (
        (vlm, pictures, "image_limit_exceeded"),
        (qwen, text, "context_length_exceeded"),
    ):
        async with served(one_processor, max_images=2, context_len=50) as one, http(one) as client:
            reply = await client.post("/chat/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
            assert one.episode.limit == code.split("_")[0].replace("image", "images")
    assert touched == []


async def test_long_texts_are_tokenized_beside_the_event_loop(qwen: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    render = type(qwen).render

    def noted(*arguments: Any, **settings: Any) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return render(*arguments, **settings)

    monkeypatch.setattr(type(qwen), "render", noted)
    async with served(qwen, context_len=20_000) as one:
        client = one.client()
        long = [{"role": "user", "content": "word " * 2000}]
        said = (await ask(client, long)).choices[0].message.content
        await ask(client, [*long, {"role": "assistant", "content": said}, {"role": "user", "content": "and " * 2000}])
        await ask(client, [{"role": "user", "content": "short"}])
        one.check()
        assert [len(segment.turns) for segment in one.episode.tree.segments()] == [2, 1]
    assert threads == [False, True]


async def test_a_large_request_and_a_slow_one_are_refused(qwen: Processor) -> None:
    async def large() -> Any:
        for _ in range(50):
            yield b"x" * 2**20

    async def slow() -> Any:
        yield b'{"messages": '
        await asyncio.sleep(5)

    async with served(qwen, gateway=Gateway(max_request_mib=2)) as one, http(one) as client:
        reply = await client.post("/chat/completions", content=b"x" * (50 * 2**20))
        assert reply.status_code == 413
        assert "gateway.max_request_mib" in reply.json()["error"]["message"]
        assert (await client.post("/chat/completions", content=large())).status_code == 413
        assert (await client.post("/chat/completions", json={"messages": ASK})).status_code == 200
    async with served(qwen, gateway=Gateway(body_timeout_s=0.5)) as one, http(one) as client:
        assert (await client.post("/chat/completions", content=slow())).status_code == 408


async def test_bodies_on_their_way_are_a_flood_as_well(qwen: Processor) -> None:
    refused = asyncio.Event()

    async def slow() -> Any:
        yield b'{"messages": '
        await refused.wait()
        yield json.dumps(ASK).encode() + b"}"

    async with served(qwen, gateway=Gateway(max_concurrent=4)) as one, http(one) as client:
        posts = [asyncio.create_task(client.post("/chat/completions", content=slow())) for _ in range(8)]
        async with asyncio.timeout(10):
            while 'status="429"} 4' not in (await client.get(one.base_url.replace("/v1", "/metrics"))).text:
                await asyncio.sleep(0.05)
        refused.set()
        statuses = sorted([reply.status_code for reply in await asyncio.gather(*posts)])
        assert statuses == [200] * 4 + [429] * 4
        assert (await client.post("/chat/completions", json={"messages": ASK})).status_code == 200
        one.check()


async def test_few_large_bodies_of_an_episode_are_in_memory_at_a_time(qwen: Processor) -> None:
    """Each of eight clients sends 3 MiB and then nothing more; the server takes more than 1 MiB from four."""
    taken = [0] * 8

    def client(number: int) -> Any:
        async def receive() -> dict[str, Any]:
            if taken[number] == 3:
                await asyncio.sleep(1000)
            taken[number] += 1
            return {"type": "http.request", "body": b" " * 2**20, "more_body": True}

        return receive

    async def send(message: Any) -> None:
        pass

    async with served(qwen) as one:
        app = make_app(one.keys.find, Gateway(), qwen)
        headers = [(b"authorization", f"Bearer {one.key}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
        tasks = [asyncio.create_task(app(scope | {"headers": headers}, client(i), send)) for i in range(8)]  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        assert sorted(taken) == [2] * 4 + [3] * 4
        assert (await ask(one.client(), ASK)).choices[0].message.content == "yes", "small ones do not wait"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert one.episode.large_bodies._value == 4


async def test_what_is_refused_leaves_nothing_behind(vlm: Processor) -> None:
    async with served(vlm, context_len=100) as one, http(one) as client:
        for number in range(5):
            content = [picture((number, 0, 0)), {"type": "text", "text": "word " * 100}]
            body = {"messages": [{"role": "user", "content": content}]}
            reply = await client.post("/chat/completions", json=body)
            assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert one.episode.tree._prompts == {}
        assert one.episode._pending == {}
        assert one.episode.num_bytes == 0


async def test_a_request_is_not_kept_while_the_engine_responds(vlm: Processor) -> None:
    def num_kept(text: str, number: int) -> str:
        return str(sum(type(one) is RawMessage for one in gc.get_objects()))

    async with served(vlm, num_kept) as one:
        reply = await ask(one.client(), [{"role": "user", "content": [picture((9, 9, 9))]}])
        assert reply.choices[0].message.content == "0"


async def test_an_episode_that_has_ended_stays_as_it_is(qwen: Processor) -> None:
    """A reward and a reply that were under way at its end change nothing of what is trained."""

    async def slow() -> Any:
        yield b'{"reward": '
        await asyncio.sleep(0.5)
        yield b"1}"

    async with served(qwen, delay_s=0.2) as one, http(one) as client:
        await ask(one.client(), ASK)
        late = asyncio.create_task(client.post("/vlmrl/reward", content=slow()))
        pending = await one.episode.request(json.dumps({"messages": ASK}).encode(), is_retry=False)
        await pending.task
        await one.episode.close()
        one.keys.remove(one.key)
        one.episode.mark_delivered(pending)
        assert (await late).status_code == 401
        assert one.episode.counts["dropped/undelivered"] == 1
        assert [turn.reward for segment in one.episode.tree.segments() for turn in segment.turns] == [0.0]
        one.check()


async def test_a_flood_is_slowed_down(qwen: Processor) -> None:
    async with served(qwen, gateway=Gateway(max_concurrent=4), delay_s=0.3) as one, http(one) as client:
        posts = [client.post("/chat/completions", json={"messages": ASK}) for _ in range(40)]
        statuses = [reply.status_code for reply in await asyncio.gather(*posts)]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) == len(one.sample.sampled) >= 4
        with_retries = one.client(max_retries=8)
        replies = await asyncio.gather(*(ask(with_retries, ASK) for _ in range(6)))
        assert len(replies) == 6
        one.check()


async def test_keys_paths_and_methods(qwen: Processor) -> None:
    async with served(qwen) as one, http(one) as client:
        root = one.base_url.removesuffix("/v1")
        assert (await client.get(f"{root}/health", headers={"Authorization": ""})).json() == {"status": "ok"}
        assert [model.id async for model in one.client().models.list()] == ["policy"]
        for wrong in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}, {"Authorization": one.key}):
            for reply in (
                await client.post("/chat/completions", json={"messages": ASK}, headers=wrong),
                await client.get("/models", headers=wrong),
                await client.post("/vlmrl/reward", json={"reward": 1}, headers=wrong),
            ):
                assert reply.status_code == 401
                assert reply.json()["error"]["code"] == "invalid_api_key"
        missing = await client.get("/engines")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        assert "there are /v1/chat/completions" in missing.json()["error"]["message"]
        assert (await client.get("/chat/completions")).status_code == 405
        metrics = (await client.get(f"{root}/metrics")).text
        assert "vlmrl_gateway_episodes 1\n" in metrics
        assert 'vlmrl_gateway_replies_total{status="401"} 9\n' in metrics
        assert one.key not in metrics
        one.keys.remove(one.key)
        with pytest.raises(openai.AuthenticationError):
            await ask(one.client(), ASK)


async def test_a_port_that_another_server_had_first_is_named_as_the_reason(qwen: Processor) -> None:
    def server(port: int) -> Server:
        gateway = Gateway(port=port)
        return Server(make_app(Keys().find, gateway, qwen), gateway)

    one = server(0)
    other = server(int(one.base_url.split(":")[-1].removesuffix("/v1")))  # nobody listens on the port yet
    await one.start()
    with pytest.raises(ClusterError, match=r"does not start at .* in use"):
        await other.start()
    await other.stop()
    await one.stop()


async def test_the_end_of_an_episode_ends_its_requests(qwen: Processor) -> None:
    async with served(qwen, delay_s=30) as one:
        waiting = asyncio.create_task(ask(one.client(), ASK))
        streaming = asyncio.create_task(ask(one.client(), ASK, stream=True))
        stream = await streaming
        await one.episode.close()
        with pytest.raises(openai.AuthenticationError):
            await waiting
        with pytest.raises(openai.APIError, match="key of an episode"):
            async for _ in stream:
                pass
        assert one.episode.counts["dropped/aborted"] == 2


async def test_limits_of_the_conversation(qwen: Processor) -> None:
    async with served(qwen, max_turns=2, context_len=200) as one:
        with pytest.raises(openai.BadRequestError) as error:
            await ask(one.client(), [{"role": "user", "content": "long " * 100}])
        assert error.value.code == "context_length_exceeded"
        assert one.episode.limit == "context"
        await ask(one.client(), ASK)
        with pytest.raises(openai.BadRequestError, match=r"agent\.max_turns is 2"):
            await ask(one.client(), ASK, n=2)
        await ask(one.client(), ASK)
        with pytest.raises(openai.BadRequestError) as turns:
            await ask(one.client(), ASK)
        assert turns.value.code == "turn_limit_exceeded"
        assert one.episode.limit == "turns"
        assert len(one.sample.sampled) == 2


async def test_an_error_of_the_engine_is_that_of_the_episode(qwen: Processor) -> None:
    async with served(qwen) as one:
        one.sample.error = ClusterError("the engine has died: /home/secret")
        with pytest.raises(openai.InternalServerError) as error:
            await ask(one.client(), ASK)
        assert error.value.status_code == 503
        assert "secret" not in str(error.value)
        assert one.episode.failure.result() is one.sample.error


async def test_rewards_are_added_to_responses(qwen: Processor) -> None:
    async with served(qwen) as one, http(one) as client:
        assert (await client.post("/vlmrl/reward", json={"reward": 1})).status_code == 400
        first = await ask(one.client(), ASK)
        await ask(one.client(), [*ASK, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "Sure?"}])
        assert (await client.post("/vlmrl/reward", json={"reward": 0.5, "response_id": first.id})).status_code == 200
        assert (await client.post("/vlmrl/reward", json={"reward": 2})).status_code == 200
        for wrong in (
            {"reward": "1"},
            {"reward": True},
            {},
            {"reward": 1e999},
            {"reward": 10**400},
            {"reward": 2e9},
            {"reward": 1, "response_id": 5},
        ):
            reply = await client.post("/vlmrl/reward", content=json.dumps(wrong))
            assert reply.status_code == 400, wrong
        assert (await client.post("/vlmrl/reward", json={"reward": 2, "response_id": "x"})).status_code == 404
        (segment,) = one.episode.tree.segments()
        assert [turn.reward for turn in segment.turns] == [0.5, 2.0]


async def test_keys_are_in_no_log(qwen: Processor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with served(qwen) as one:
        await ask(one.client(), ASK)
        one.sample.error = RuntimeError("a bug")
        with pytest.raises(openai.InternalServerError) as error:
            await ask(one.client(), ASK)
        assert "a bug" not in str(error.value)
        ours = [record for record in caplog.records if not record.name.startswith(("openai", "httpx", "httpcore"))]
        assert not any(one.key in record.getMessage() for record in ours)
