"""The environments in examples/agents/ play episodes in processes of their own."""

import importlib.util
import json
import os
import random
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from vlmrl.agents.environments import EnvironmentRaised, Environments, Observation, ToolError
from vlmrl.config.data import Columns
from vlmrl.data.media import ImageLimits
from vlmrl.errors import ConfigError
from vlmrl.plugins import processor_of

pytestmark = pytest.mark.anyio
FOLDER = Path(__file__).parents[2] / "examples" / "agents"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def example(name: str) -> ModuleType:
    """The module, in this process."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environments(name: str, make: str = "make", **settings: Any) -> Environments:
    defaults: dict[str, Any] = {"num_workers": 1, "step_limit_s": 30.0, "limits": ImageLimits(0, 10**6, 10**6)}
    return Environments(f"{FOLDER / name}.py:{make}", **defaults | settings)


def text_of(observation: Observation) -> str:
    """Its last part."""
    text = observation.parts[-1]
    assert isinstance(text, str)
    return text


async def test_a_text_game_is_won_by_bisection() -> None:
    async with environments("text_game") as made, await made.open() as game:
        assert "from 1 to 100" in text_of(await game.reset(None, 5))
        assert text_of(await game.step("a guess")) == "That is no number. Guess again."
        low, high = 1, 100
        num_guesses, reply = 1, Observation(())
        while not reply.done:
            num_guesses += 1
            guess = (low + high) // 2
            reply = await game.step(f"Is it {guess}?")
            if not reply.done:
                low, high = (guess + 1, high) if "higher" in text_of(reply) else (low, guess - 1)
        assert reply.reward == 1 / num_guesses


async def test_the_picture_shows_disc_and_goal_and_the_seed_decides_the_episode() -> None:
    steer = example("steer").Steer()
    async with environments("steer") as made:
        for seed in range(3):
            async with await made.open() as environment:
                first = await environment.reset(None, seed)
                steer.reset(seed)
                for _ in range(100):
                    picture, best = first.parts[0], steer.best()
                    assert isinstance(picture, np.ndarray)
                    assert picture.shape == (112, 112, 3)
                    assert np.array_equal(picture, np.asarray(steer.picture()))
                    assert _centre(picture, steer.at) == [214, 40, 40]
                    assert _centre(picture, steer.goal) == [42, 157, 80]
                    expected, first = steer.step(f"I go {best}."), await environment.step(f"I go {best}.")
                    assert (first.reward, first.done) == (expected.reward, expected.done)
                    if first.done:
                        break
                assert first.done


def test_one_move_in_five_slips_and_a_perfect_player_mostly_wins() -> None:
    module = example("steer")
    steer, wins, slips, moves = module.Steer(), 0.0, 0, 0
    for seed in range(2000):
        steer.reset(seed)
        while True:
            at, best = steer.at, steer.best()
            x, y = module.MOVES[best]
            reply = steer.step(best)
            moves += 1
            slips += steer.at != (at[0] + x, at[1] + y)
            if reply.done:
                wins += reply.reward
                break
    assert wins / 2000 == pytest.approx(0.9, abs=0.02)
    assert slips / moves == pytest.approx(0.2, abs=0.02)


def test_a_random_player_mostly_loses() -> None:
    steer, player, wins = example("steer").Steer(), random.Random(0), 0.0
    for seed in range(2000):
        steer.reset(seed)
        while not (reply := steer.step(player.choice(["up", "down", "left", "right"]))).done:
            pass
        wins += reply.reward
    assert wins / 2000 == pytest.approx(0.13, abs=0.02)


async def test_the_zoom_shows_a_cell() -> None:
    async with environments("steer", "make_with_zoom") as made, await made.open() as environment:
        steer = example("steer").Steer()
        steer.reset(3)
        await environment.reset(None, 3)
        x, y = steer.goal
        (cell,) = (await environment.call_tool("zoom", {"x": x, "y": y})).parts
        assert isinstance(cell, np.ndarray)
        assert cell.shape == (112, 112, 3)
        assert cell[56, 56].tolist() == [42, 157, 80]
        with pytest.raises(ToolError, match="columns and rows are 0 to 3"):
            await environment.call_tool("zoom", {"x": 4, "y": 0})


async def test_a_part_of_the_rows_picture_is_enlarged() -> None:
    pixels = np.zeros((80, 120, 3), np.uint8)
    pixels[40:70, 60:120] = (10, 200, 30)
    async with environments("zoom") as made, await made.open() as environment:
        first = await environment.reset({"question": "How many?", "label": "3", "metadata": {}}, 1, images=[pixels])
        assert not first.parts  # the row's own prompt
        (part,) = (await environment.call_tool("zoom", {"left": 60, "top": 40, "right": 500, "bottom": 70})).parts
        assert isinstance(part, np.ndarray)
        assert part.shape == (280, 560, 3)
        assert (part == (10, 200, 30)).all()
        with pytest.raises(ToolError, match="at least 28 x 28 pixels; the picture has \\(120, 80\\)"):
            await environment.call_tool("zoom", {"left": 60, "top": 40, "right": 80, "bottom": 70})
        with pytest.raises(ToolError, match="there are 1 pictures"):
            await environment.call_tool("zoom", {"left": 0, "top": 0, "right": 80, "bottom": 70, "picture": 2})
        last = await environment.step("\\boxed{3}")
        assert last.done
        assert last.reward == 0  # the run's reward functions score the response
    async with environments("zoom") as made, await made.open() as environment:
        with pytest.raises(EnvironmentRaised, match="needs rows with images"):
            await environment.reset({"question": "How many?", "label": "3", "metadata": {}}, 1)


async def test_the_calculator_rewards_a_right_result_after_a_call() -> None:
    async with environments("calculator") as made:
        for calls, answer, reward in ((True, "{}", 1.0), (False, "{}", 0.0), (True, "1{}", 0.0), (True, "none", 0.0)):
            async with await made.open() as environment:
                question = text_of(await environment.reset(None, 1))
                one, two = map(int, re.findall(r"\d+", question))
                if calls:
                    result = await environment.call_tool("calculate", {"expression": f"({one}) * {two} + 0"})
                    assert text_of(result) == str(one * two)
                reply = await environment.step("It is " + answer.format(one * two))
                assert (reply.reward, reply.done) == (reward, True)
        async with await made.open() as environment:
            assert (await environment.reset({"question": "2 + 2?", "label": "4", "metadata": {}}, 0)).parts == ()
            for expression in ("__import__('os').getpid()", "2 ** 9", "2 +", "1 / 0"):
                with pytest.raises(ToolError):
                    await environment.call_tool("calculate", {"expression": expression})
            assert text_of(await environment.call_tool("calculate", {"expression": "-7 // 2"})) == "-4"
            assert (await environment.step("4")).reward == 1.0


@pytest.mark.parametrize(("name", "make"), [("calculator", "Calculator"), ("python_tool", "PythonTool")])
@pytest.mark.parametrize("row", [{"question": "2 + 2?", "label": None, "metadata": {}}, {"question": "2 + 2?"}])
async def test_a_row_without_a_label_is_refused_in_one_line(name: str, make: str, row: dict[str, Any]) -> None:
    async with environments(name, make) as made, await made.open() as environment:
        message = r"^ValueError: the row has no label to compare results with: set data.label_key .*\.py:\d+\)$"
        with pytest.raises(EnvironmentRaised, match=message):
            await environment.reset(row, 0)


def test_demonstrations_of_the_calculator_are_as_episodes_go(tmp_path: Path) -> None:
    start = example("calculator_start")
    start.main(tmp_path)
    rows, questions, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("demonstrations", "questions", "held_out")
    )
    calls = [row["answer"] for row in rows[::2] if row["answer"].startswith("[")]
    assert len(calls) / len(rows[::2]) == pytest.approx(1 / 8, abs=0.001)
    asked = [row["input"][1]["content"] for row in rows[::2]] + [row["input"] for row in (*questions, *held_out)]
    assert len(asked) == len(set(asked)) == 89 * 89
    processor = processor_of(str(tmp_path / "start"), Columns(), trust_remote_code=False)
    schema = {"type": "object", "properties": {"expression": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "calculate", "description": "", "parameters": schema}}
    for number, (first, called) in enumerate(zip(rows[:16:2], rows[1:16:2], strict=True)):
        prompt = processor.render(first["input"], num_images=0, columns=Columns())
        question, result = first["input"][-1]["content"], called["answer"]
        assert prompt == processor.render(question, num_images=0, columns=Columns(), tools=[tool])
        one, two = map(int, question.split(" * "))
        assert result == str(one * two)
        call = f'[calculate(expression="{question}")]'
        assert first["answer"] == (call if number == 0 else f"{question} = {result}")
        tail = processor.template.after_response([{"role": "tool", "content": [{"type": "text", "text": result}]}])
        assert processor.render(called["input"], num_images=0, columns=Columns()) == prompt + call + tail


HARMFUL = {
    "open('/etc/harm', 'w')": "Read-only file system",
    "open('/tmp/harm', 'wb').write(bytes(20 << 20))": "File too large",
    "import socket; socket.create_connection(('127.0.0.1', 22), 1)": "Network is unreachable",
    "bytearray(10**9)": "MemoryError",
    "import os; print(os.listdir('/proc'), os.environ)": "[] environ({'LC_CTYPE'",
    f"import os; os.kill({os.getpid()}, 9)": "No such process",
    "print('x' * 10**8)": "[cut]",
    "import time; print('begun', flush=True); time.sleep(60)": "begun\n\n[ended after 5 s]",
}


async def test_python_runs_in_a_sandbox() -> None:
    if not _has_namespaces():
        pytest.skip("this machine does not permit namespaces")
    async with environments("python_tool") as made, await made.open() as environment:
        question = text_of(await environment.reset(None, 4))
        divisor, bound = map(int, re.findall(r"\d+", question.replace("from 1", "")))
        code = f"total = 0\nfor n in range({divisor}, {bound} + 1, {divisor}):\n    total += n * n\nprint(total)"
        result = text_of(await environment.call_tool("python", {"code": code}))
        for harm, message in HARMFUL.items():
            output = text_of(await environment.call_tool("python", {"code": harm}))
            assert message in output, harm
            assert len(output) < 5000
        reply = await environment.step(f"The sum is {result}")
        assert (reply.reward, reply.done) == (1.0, True)
    assert not Path("/etc/harm").exists()


async def test_python_is_refused_without_a_sandbox(tmp_path: Path) -> None:
    code = (FOLDER / "python_tool.py").read_text().replace('NAMESPACES = ["unshare",', 'NAMESPACES = ["false",')
    (tmp_path / "no_sandbox.py").write_text(code)
    made = Environments(f"{tmp_path}/no_sandbox.py:make", num_workers=1, step_limit_s=9.0, limits=ImageLimits(0, 1, 1))
    with pytest.raises(ConfigError, match="this machine permits no sandbox for Python"):
        await made.start()


async def test_a_rendered_frame_of_gymnasium_is_an_image() -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("pygame")
    async with environments("gymnasium_env") as made, await made.open() as environment:
        first = await environment.reset(None, 2**40)
        picture = first.parts[0]
        assert isinstance(picture, np.ndarray)
        assert picture.shape[2] == 3
        assert text_of(first) == "Which way to the gift? Answer left, down, right, up."
        assert text_of(await environment.step("Hm.")) == "Answer left, down, right, up."
        moved = (await environment.step("Down!")).parts[0]
        assert not np.array_equal(picture, moved)
        for word in ("down", "right", "right", "down", "right"):
            reply = await environment.step(word)
        assert (reply.reward, reply.done) == (1.0, True)


@pytest.mark.parametrize(
    ("name", "library", "message"),
    [
        ("gymnasium_env", "gymnasium", "gymnasium is not installed: pip install 'gymnasium"),
        ("openenv_client", "openenv", "OpenEnv's client is not installed: pip install openenv-core"),
    ],
)
async def test_a_missing_library_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str, message: str
) -> None:
    (tmp_path / f"{library}.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        await environments(name).start()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str

class Said(Observation):
    text: str
    image: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.seed = seed
        return self.said("hello")
    def step(self, action, **kwargs):
        return self.said(action.message)
    def said(self, text):
        png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
        return Said(text=f"{text} {self.seed}", image=png, reward=0.5, done=text == "bye")
    @property
    def state(self):
        return State()

uvicorn.run(create_fastapi_app(Echo, Say, Said, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture
def openenv_url() -> Iterator[str]:
    """The address of an OpenEnv server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(SERVER), str(port)], env=environment) as server:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.kill()


async def test_episodes_of_an_openenv_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openenv.core")
    monkeypatch.setenv("OPENENV_URL", request.getfixturevalue("openenv_url"))
    async with environments("openenv_client") as made:
        assert made.is_async
        one, two = await made.open(), await made.open()
        first = await one.reset(None, 3)
        await two.reset(None, 4)
        assert first.parts[0].shape == (1, 1, 3)  # type: ignore[union-attr]
        assert '"text": "hello 3"' in text_of(first)
        assert '"text": "on 4"' in text_of(await two.step("on"))
        last = await one.step("bye")
        assert (last.reward, last.done) == (0.5, True)
        await one.close()
        await two.close()


def _centre(picture: np.ndarray[Any, Any], cell: tuple[int, int]) -> list[int]:
    x, y = cell
    centre: list[int] = picture[28 * y + 14, 28 * x + 14].tolist()
    return centre


def _has_namespaces() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
