"""Episodes of environments: calls, limits, and processes that are lost and replaced."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents.user_environments import environments, play, text_of

from vlmrl.agents.environments import EnvironmentLost, EnvironmentRaised, ToolError
from vlmrl.errors import ClusterError, ConfigError

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("quick_processes", "no_leftover_processes")]

BOTH = pytest.mark.parametrize("make", ["Sync", "Async"])


@BOTH
async def test_an_episode_from_its_seed(user_file: Path, make: str) -> None:
    async with environments(user_file, make) as made, await made.open() as environment:
        assert made.is_async == (make == "Async")
        first = await environment.reset(None, 7)
        assert (first.parts, first.reward, first.done) == (("seed 7",), 0.0, False)
        reply = await environment.step("left")
        assert (reply.parts, reply.reward, reply.done) == (("you said left",), 1.0, False)
        last = await environment.step("stop")
        assert (last.parts, last.reward, last.done) == ((), 0.5, True)


@BOTH
async def test_a_row_and_its_images(user_file: Path, make: str) -> None:
    row = {"question": "How many?", "label": "3", "metadata": {"level": 2}}
    red = np.full((3, 5, 3), (255, 0, 10), np.uint8)
    async with environments(user_file, make) as made, await made.open() as environment:
        assert text_of(await environment.reset(row, 0)) == "How many? 3 2"
        one, two = (await environment.reset(row, 0, [red, red[:2]])).parts
    assert np.array_equal(one, np.full((3, 5, 3), (0, 255, 245), np.uint8))
    assert np.array_equal(two, one[:2])
    assert isinstance(one, np.ndarray)
    assert one.dtype == np.uint8


async def test_without_reset_the_first_message_is_the_prompt_of_the_row(user_file: Path) -> None:
    async with environments(user_file, "Plain") as made, await made.open() as environment:
        assert (await environment.reset({"question": "How many?", "label": None, "metadata": {}}, 0)).parts == ()
        assert text_of(await environment.step("4")) == "you said 4"
        with pytest.raises(ConfigError, match="reset returned None, for the row's own prompt"):
            await environment.reset(None, 0)


@BOTH
async def test_tools(user_file: Path, make: str) -> None:
    async with environments(user_file, make) as made, await made.open() as environment:
        await environment.reset(None, 7)
        (image,) = (await environment.call_tool("zoom", {"x": "4", "y": 2})).parts
        assert isinstance(image, np.ndarray)
        assert image.tolist() == [[[4, 2, 0]] * 4] * 4
        assert text_of(await environment.call_tool("facts", {})) == '{"seed": 7, "list": [1, null]}'
        ended = await environment.call_tool("act", {"what": "stop"})
        assert (ended.reward, ended.done) == (0.5, True)
        if make == "Async":
            assert text_of(await environment.call_tool("later", {"n": 4})) == "8"


async def test_tools_are_described_at_the_start(user_file: Path) -> None:
    made = environments(user_file, "Sync")
    try:
        zoom, act, facts, fails = await made.start()
    finally:
        await made.close()
    assert [tool.name for tool in (zoom, act, facts, fails)] == ["zoom", "act", "facts", "fails"]
    assert zoom.description == "Enlarge the cell at x, y."
    assert zoom.parameters == {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
        "required": ["x"],
        "additionalProperties": False,
    }


def nested(depth: int) -> list[Any]:
    lists: list[Any] = []
    for _ in range(depth):
        lists = [lists]
    return lists


BAD_CALLS: list[tuple[str, Any, str]] = [
    ("zoom", {"x": "left"}, "x: Input should be a valid integer"),
    ("zoom", [1], "must be an object"),
    ("zoom", {"x": 10**400}, "cannot be used"),
    ("zoom", {"x": "\ud800"}, "cannot be used"),
    ("step", {}, "there is no tool step; there are: zoom, act, facts, fails"),
    ("fails", {}, "ValueError: not today"),
    ("zoom", {"x": nested(400)}, "x: Input should be a valid integer"),
    ("zoom", {"x": nested(5000)}, "cannot be used"),
    ("act", {"what": "sys.exit"}, "SystemExit: 4"),
]


async def test_a_call_that_fails_is_an_error_for_the_policy_and_the_episode_goes_on(user_file: Path) -> None:
    async with environments(user_file, "Sync") as made, await made.open() as environment:
        await environment.reset(None, 7)
        for name, arguments, message in BAD_CALLS:
            with pytest.raises(ToolError) as error:
                await environment.call_tool(name, arguments)
            assert message in str(error.value)
            assert "\n" not in str(error.value)
            assert text_of(await environment.step("on")) == "you said on"
        with pytest.raises(EnvironmentRaised, match="act returned the reward nan"):
            await environment.call_tool("act", {"what": "nan"})


@BOTH
async def test_what_an_environment_returns_is_checked_and_the_next_is_unaffected(user_file: Path, make: str) -> None:
    outcomes = {
        "bomb": r"\(30000x30000\) has more than 100000 pixels",
        "nan": "step returned the reward nan, which is not a finite number",
        "none": "step returned None where a Reply is expected",
        "surrogate": r"ValueError: \\ud800",
        "hostile": "HostileError",
        "sys.exit": r"SystemExit: 4 \(.*my_environment.py:\d+\)",
    }
    async with environments(user_file, make) as made:
        for response, message in outcomes.items():
            async with await made.open() as environment:
                await environment.reset(None, 7)
                with pytest.raises(EnvironmentRaised, match=message) as error:
                    await environment.step(response)
                assert error.value.blame == "response"
                assert "\n" not in str(error.value)
        assert await play(await made.open(), ["x"]) == ["seed 7", "you said x"]


async def test_an_error_of_the_network_is_not_the_responses(user_file: Path) -> None:
    async with environments(user_file, "Sync") as made, await made.open() as environment:
        await environment.reset(None, 7)
        with pytest.raises(EnvironmentRaised, match="ConnectionError: no route") as error:
            await environment.step("offline")
        assert error.value.blame == "infrastructure"


@BOTH
async def test_raising_on_every_third_step_ends_the_episode_alone(user_file: Path, make: str) -> None:
    async with environments(user_file, make, num_workers=2) as made:
        episodes = [["third"] * 4, ["x"] * 4, ["third"] * 2]
        raised, *others = await asyncio.gather(*[play(await made.open(), texts) for texts in episodes[:2]])
        assert raised[:3] == ["seed 7", "you said third", "you said third"]
        assert raised[3].startswith("EnvironmentRaised: RuntimeError: step 3 (")
        assert others == [["seed 7", *["you said x"] * 4]]


@pytest.mark.parametrize(("response", "message"), [("sleep", "step took longer than 0.5 s"), ("exit", "exit code 3")])
async def test_a_killed_environment_affects_no_other(user_file: Path, response: str, message: str) -> None:
    async with environments(user_file, "Sync", num_workers=3, step_limit_s=0.5) as made:
        good, bad = ["a", "b", "c"], ["a", response]
        first, lost, second = await asyncio.gather(
            *[play(await made.open(), responses) for responses in (good, bad, good)]
        )
        assert first == second == ["seed 7", "you said a", "you said b", "you said c"]
        assert lost[:2] == ["seed 7", "you said a"]
        assert lost[2].startswith("EnvironmentLost: ")
        assert message in lost[2]
        assert await asyncio.gather(*[play(await made.open(), good) for _ in range(3)]) == [first] * 3


@pytest.mark.parametrize("make", ["Sync", "Async"])
@pytest.mark.parametrize(("response", "message"), [("too long", "killed by signal 9"), ("garbage", "something else")])
async def test_a_process_that_breaks_the_protocol_is_killed(
    user_file: Path, make: str, response: str, message: str
) -> None:
    async with environments(user_file, make) as made:
        assert message in (await play(await made.open(), [response]))[1]
        assert await play(await made.open(), ["x"]) == ["seed 7", "you said x"]


@pytest.mark.parametrize("response", ["many parts", "much text"])
async def test_a_process_that_sends_more_than_an_observation_may_have_is_killed(user_file: Path, response: str) -> None:
    async with environments(user_file, "Sync") as made:
        assert "too large" in (await play(await made.open(), [response]))[1]
        assert await play(await made.open(), ["x"]) == ["seed 7", "you said x"]


@pytest.mark.parametrize(("response", "kind"), [("sleep", "timeout"), ("spin", "timeout"), ("exit", "death")])
async def test_a_replacement_takes_milliseconds(user_file: Path, response: str, kind: str) -> None:
    durations = []
    async with environments(user_file, "Sync", step_limit_s=0.3) as made:
        for _ in range(4):
            environment = await made.open()
            await environment.reset(None, 7)
            with pytest.raises(EnvironmentLost) as error:
                await environment.step(response)
            assert error.value.kind == kind
            start = time.monotonic()
            await environment.close()
            async with await made.open() as next_one:
                await next_one.reset(None, 7)
            durations.append(time.monotonic() - start)
    assert min(durations) < 0.2


async def test_synchronous_episodes_wait_for_a_free_process(user_file: Path) -> None:
    async with environments(user_file, "Sync", num_workers=2) as made:
        one, two = await made.open(), await made.open()
        third = asyncio.create_task(made.open())
        await asyncio.sleep(0.1)
        assert not third.done()
        await one.close()
        async with await third as environment:
            assert text_of(await environment.reset(None, 1)) == "seed 1"
        await two.close()
        await two.close()


async def test_a_wait_lasts_as_long_as_episodes_end(user_file: Path) -> None:
    async with environments(user_file, "Sync", wait_limit_s=1.0) as made:
        held = await made.open()
        waiting = [asyncio.create_task(made.open(source=f"toy:{number}")) for number in range(4)]
        for task in waiting:
            await asyncio.sleep(0.6)
            await held.close()
            held = await task
        late = asyncio.create_task(made.open(source="toy:9"))
        with pytest.raises(
            ClusterError, match=r"^toy:9 waits .* none of the 1 episodes .* within 1 s.*--agent.num_wor"
        ):
            await late
        await held.close()
        assert await play(await made.open(), ["x"]) == ["seed 7", "you said x"]


async def test_a_process_is_used_again(user_file: Path) -> None:
    async with environments(user_file, "Sync") as made:
        assert await play(await made.open(), ["pid"]) == await play(await made.open(), ["pid"])


async def test_a_cancelled_call_frees_the_slot_with_a_new_process(user_file: Path) -> None:
    async with environments(user_file, "Sync") as made:
        environment = await made.open()
        await environment.reset(None, 7)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await environment.step("sleep")
        await environment.close()
        assert await play(await made.open(), ["x"]) == ["seed 7", "you said x"]


async def test_a_close_that_hangs_is_killed(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrl.agents.open_environment.CLOSE_CALL_LIMIT_S", 0.3)
    async with environments(user_file, "Sync") as made:
        assert (await play(await made.open(), ["close hangs"]))[-1] == "you said close hangs"
        assert await play(await made.open(), ["x"]) == ["seed 7", "you said x"]


async def test_a_synchronous_environment_may_run_an_event_loop(user_file: Path) -> None:
    async with environments(user_file, "OwnLoop") as made, await made.open() as environment:
        await environment.reset({}, 0)
        assert text_of(await environment.step("x")) == "x"


async def test_hundreds_of_asynchronous_environments_share_a_process(user_file: Path) -> None:
    async with environments(user_file, "Async") as made:
        start = time.monotonic()
        episodes = await asyncio.gather(*[play(await made.open(), ["0.2 s", "0.2 s", "pid"]) for _ in range(300)])
        assert time.monotonic() - start < 10
        assert episodes == [["seed 7", "you said 0.2 s", "you said 0.2 s", episodes[0][3]]] * 300


async def test_asynchronous_episodes_spread_over_the_processes(user_file: Path) -> None:
    async with environments(user_file, "Async", num_workers=3) as made:
        opened = [await made.open() for _ in range(6)]
        pids = [await play(environment, ["pid"]) for environment in opened]
        assert sorted(pids.count(pid) for pid in pids) == [2] * 6


@pytest.mark.parametrize("response", ["wait", "ignore"])
async def test_an_asynchronous_environment_that_hangs_is_cancelled_alone(user_file: Path, response: str) -> None:
    async with environments(user_file, "Async", step_limit_s=0.5) as made:
        lost, *others = await asyncio.gather(
            play(await made.open(), [response]), *[play(await made.open(), ["0.2 s"] * 5) for _ in range(5)]
        )
        assert lost == ["seed 7", "EnvironmentLost: step took longer than 0.5 s"]
        assert others == [["seed 7", *["you said 0.2 s"] * 5]] * 5


async def test_one_that_raises_cancelled_is_like_any_other_error(user_file: Path) -> None:
    async with environments(user_file, "Async") as made:
        assert (await play(await made.open(), ["cancelled"]))[1].startswith("EnvironmentRaised: CancelledError")


@pytest.mark.parametrize("response", ["spin", "exit"])
async def test_one_that_blocks_the_loop_takes_its_process_with_it_and_a_second_attempt_is_alone(
    user_file: Path, response: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmrl.agents.process._CANCEL_LIMIT_S", 0.5)
    async with environments(user_file, "Async", num_workers=2, step_limit_s=0.5) as made:
        opened = [await made.open() for _ in range(4)]  # on processes 1, 2, 1, 2
        bad, away, near, _ = [
            asyncio.create_task(play(environment, responses))
            for environment, responses in zip(
                opened, [["0.2 s", response], ["0.2 s"] * 6, ["0.2 s"] * 6, ["x"]], strict=True
            )
        ]
        assert await away == ["seed 7", *["you said 0.2 s"] * 6]
        assert (await bad)[-1].startswith("EnvironmentLost: ")
        assert (await near)[-1].startswith("EnvironmentLost: ")
        again = [await made.open(alone=True), await made.open(alone=True)]
        lost, kept = await asyncio.gather(play(again[0], [response]), play(again[1], ["0.2 s"] * 6))
        assert lost[-1].startswith("EnvironmentLost: ")
        assert kept == ["seed 7", *["you said 0.2 s"] * 6]
        assert await play(await made.open(), ["x"]) == ["seed 7", "you said x"]
