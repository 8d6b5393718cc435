import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from agents.user_environments import environments, play, text_of

from vlmrl.agents.environments import EnvironmentLost, EnvironmentRaised, ToolError
from vlmrl.agents.messages import Orders
from vlmrl.agents.process import Process
from vlmrl.agents.spawner import Spawner
from vlmrl.errors import ClusterError, ConfigError

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leftover_processes")]

ROOT = Path(__file__).parents[3]
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
    monkeypatch.setattr("vlmrl.agents.environments.CLOSE_CALL_LIMIT_S", 0.3)
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


async def test_what_an_environment_starts_dies_with_it(user_file: Path) -> None:
    async with environments(user_file, "Sync", step_limit_s=0.5) as made:
        for end in ("sleep", "exit"):
            _, pid, _ = await play(await made.open(), ["fork", end])
            deadline = time.monotonic() + 5
            while psutil.pid_exists(int(pid)) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            assert not psutil.pid_exists(int(pid))
        _, last = await play(await made.open(), ["fork"])
    assert not psutil.pid_exists(int(last))


async def test_output_goes_to_the_log_and_there_is_no_input(user_file: Path, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "environments.log"
    async with environments(user_file, "Sync", log=log) as made:
        await play(await made.open(), ["print"])
        assert "EOFError" in (await play(await made.open(), ["input"]))[1]
    lines = log.read_text().splitlines()
    assert lines[:2] == ["I see it", "natively"]
    assert "Traceback (most recent call last):" in lines


async def test_secrets_are_hidden_except_those_that_are_passed(
    user_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "sesame")
    monkeypatch.setenv("MY_COLOUR", "red")
    async with environments(user_file, "Sync") as made:
        texts = await play(await made.open(), ["variable", "secret of the server"])
        assert texts[1:] == ["hidden red", "False"]
    async with environments(user_file, "Sync", pass_env=("MY_API_KEY",)) as made:
        assert (await play(await made.open(), ["variable"]))[1] == "sesame red"
    with pytest.raises(ConfigError, match=r"agent\.pass_env: the environment has no variable NOT_THERE"):
        environments(user_file, "Sync", pass_env=("NOT_THERE",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("missing", "has no function missing"),
        ("NoStep", "has no step(self, response)"),
        ("Asks", "requires difficulty"),
        ("Two", "Two.step takes the response, and nothing else"),
        ("Untyped", "Untyped: tool grow: parameter x needs a type"),
        ("Undocumented", "tool grow needs a docstring"),
        ("broken", "cannot be used: ValueError: no licence"),
        ("leaves", "exit code 5"),
        ("later", "is async; write def"),
    ],
)
async def test_environments_that_cannot_be_used_are_refused_at_the_start(
    user_file: Path, make: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        await environments(user_file, make).start()
    assert message in str(error.value)
    assert str(error.value).startswith("train.agent_func_path: ")
    assert "\n" not in str(error.value)


async def test_closing_ends_calls_and_a_lost_server_is_replaced(user_file: Path) -> None:
    async with environments(user_file, "Sync") as made:
        environment = await made.open()
        await environment.reset(None, 7)
        call = asyncio.create_task(environment.step("sleep"))
        await asyncio.sleep(0.1)
        (server,) = (child for child in psutil.Process().children() if "serve(" in " ".join(child.cmdline()))
        assert server.num_threads() == 1, "else a fork of it might hang"
        server.kill()
        with pytest.raises(EnvironmentLost):
            await call
        await environment.close()
        environment = await made.open()
        assert text_of(await environment.reset(None, 7)) == "seed 7"
        call = asyncio.create_task(environment.step("sleep"))
        await asyncio.sleep(0.1)
    with pytest.raises(EnvironmentLost):
        await call
    with pytest.raises(EnvironmentLost):
        await environment.step("x")
    await environment.close()
    with pytest.raises(EnvironmentLost, match="were closed"):
        await made.open()


SLOW = """
import fcntl, time
from pathlib import Path

from vlmrl.agents import Reply

folder = Path(__file__).parent
if (folder / "broken").exists():
    raise ValueError("no licence")
if (folder / "hangs").exists():
    time.sleep(1000)
with (folder / "core").open("w") as core:  # one at a time, as on a busy core
    fcntl.flock(core, fcntl.LOCK_EX)
    time.sleep(0.7)


class Plain:
    def step(self, response):
        return Reply("x")
"""


async def test_a_file_that_cannot_be_loaded_again_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    async with environments(file, "Plain", num_workers=2) as made, await made.open() as first:
        await first.reset({}, 0)
        (tmp_path / "broken").touch()
        with pytest.raises(EnvironmentLost, match="no licence") as broken:
            await made.open()
        assert broken.value.kind == "death"
        (tmp_path / "broken").unlink()
        (tmp_path / "hangs").touch()
        monkeypatch.setattr("vlmrl.agents.environments.START_LIMIT_S", 0.5)
        with pytest.raises(EnvironmentLost, match=r"takes over 0\.5 s to load") as hangs:
            await made.open()
        assert hangs.value.kind == "timeout"
        assert text_of(await first.step("on")) == "x"


async def test_the_time_of_a_start_begins_when_a_core_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    monkeypatch.setattr("vlmrl.agents.environments.MAX_STARTING", 1)
    async with environments(file, "Plain", num_workers=8) as made:
        monkeypatch.setattr("vlmrl.agents.environments.START_LIMIT_S", 3.5)
        opened = await asyncio.gather(*[made.open() for _ in range(8)])  # 0.7 s of a core each, but for the first
        for environment in opened:
            await environment.close()


async def test_a_server_that_is_lost_while_a_process_starts_ends_the_start_at_once(user_file: Path) -> None:
    orders = Orders(f"{user_file}:Sync", 100, 100)
    spawner = Spawner(orders)
    try:
        process = Process(spawner, orders)
        await spawner.close()  # between the choice of the server and its order
        async with asyncio.timeout(20):
            with pytest.raises(EnvironmentLost) as error:
                await process.start("sync")
        assert error.value.kind == "death"
        assert not process.is_usable
    finally:
        await spawner.close()


def test_a_killed_run_leaves_no_process(user_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(f"""
            import asyncio, psutil
            from vlmrl.agents.environments import Environments
            from vlmrl.data.media import ImageLimits
            async def main():
                spec, limits = {str(user_file)!r} + ":Sync", ImageLimits(0, 100, 100)
                async with Environments(spec, num_workers=2, step_limit_s=60, limits=limits) as e:
                    one, two = await e.open(), await e.open()
                    for opened in (one, two):
                        await opened.reset(None, 0)
                        await opened.step("fork")
                    spin = asyncio.create_task(one.step("spin"))
                    await asyncio.sleep(0.2)
                    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
                    await asyncio.sleep(60)
            if __name__ == "__main__":
                asyncio.run(main())
        """)
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 5, "the server, two environments, and a child of each"
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    # A zombie counts as ended: in a container, process 1 may never collect it.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_episodes_in_the_event_loop_of_rays_workers(user_file: Path, anyio_backend: object) -> None:
    assert "uvloop" in type(asyncio.get_running_loop()).__module__
    async with environments(user_file, "Sync") as made, await made.open() as environment:
        assert text_of(await environment.reset(None, 7)) == "seed 7"
        assert text_of(await environment.step("left")) == "you said left"
