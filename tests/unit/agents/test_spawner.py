"""Processes of environments: their start, output, secrets and end."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from agents.user_environments import environments, play, text_of
from processes import command_line, runs

from vlmrl.agents.environments import EnvironmentLost
from vlmrl.agents.messages import Orders
from vlmrl.agents.process import Process
from vlmrl.agents.spawner import Spawner
from vlmrl.errors import ConfigError

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leftover_processes")]

ROOT = Path(__file__).parents[3]


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
        ("later", "is async, so it is an agent"),
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
        (server,) = (child for child in psutil.Process().children() if "serve(" in command_line(child))
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
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if runs(pid)]


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_episodes_in_the_event_loop_of_rays_workers(user_file: Path, anyio_backend: object) -> None:
    assert "uvloop" in type(asyncio.get_running_loop()).__module__
    async with environments(user_file, "Sync") as made, await made.open() as environment:
        assert text_of(await environment.reset(None, 7)) == "seed 7"
        assert text_of(await environment.step("left")) == "you said left"
