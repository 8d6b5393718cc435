"""Environments as users write them, and ways to play them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vlmrl.agents.environments import EnvironmentLost, EnvironmentRaised, Environments, Observation, OpenEnvironment
from vlmrl.data.media import ImageLimits

LIMITS = ImageLimits(image_bytes=0, image_pixels=100_000, total_pixels=150_000)

ENVIRONMENTS = '''
import asyncio, contextlib, os, socket, stat, subprocess, sys, time
from pathlib import Path

from PIL import Image

from vlmrl.agents import Reply, tool
from vlmrl.agents.messages import Answer, encode

WRONG = {"nan": Reply("x", reward=float("nan")), "none": None}


class HostileError(Exception):
    def __str__(self):
        raise RuntimeError

    def __getattr__(self, name):
        raise RuntimeError


def is_socket(number):
    return stat.S_ISSOCK(os.fstat(number).st_mode)


def act(response):
    if response in WRONG:
        return WRONG[response]
    if response == "bomb":
        return Reply(Image.new("L", (30_000, 30_000)))
    if response == "sleep":
        time.sleep(1000)
    if response == "spin":
        while True:
            pass
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit(4)
    if response == "offline":
        raise ConnectionError("no route")
    if response == "print":
        print("I see it")
        subprocess.run(["echo", "natively"])
    if response in ("too long", "garbage"):
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                if is_socket(number):
                    os.write(number, b"\\xff\\xff\\xff\\xff" if response == "too long" else b"\\0\\0\\0\\1\\xc1")
        time.sleep(1000)
    if response in ("many parts", "much text"):
        parts = ["x"] * 300 if response == "many parts" else ["x" * 600_000] * 2
        (connection,) = (n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}") and is_socket(n))
        with socket.socket(fileno=os.dup(connection)) as stream:
            stream.sendall(encode(Answer(2, "observation", parts)))
        time.sleep(1000)
    if response == "hostile":
        raise HostileError
    if response == "surrogate":
        raise ValueError("\\ud800")
    if response == "fork":
        return Reply(str(subprocess.Popen(["sleep", "1000"]).pid))
    if response == "variable":
        return Reply(os.environ.get("MY_API_KEY", "hidden") + " " + os.environ.get("MY_COLOUR", "hidden"))
    if response == "secret of the server":
        return Reply(str("sesame" in Path(f"/proc/{os.getppid()}/environ").read_text()))
    if response == "pid":
        return Reply(str(os.getpid()))
    if response == "input":
        return Reply(input())
    if response == "stop":
        return Reply(done=True, reward=0.5)
    return Reply(f"you said {response}", reward=1)


class Sync:
    def reset(self, row, seed):
        self.count, self.row, self.seed, self.hangs = 0, row, seed, False
        if row and "images" in row:
            return [Image.eval(image, lambda value: 255 - value) for image in row["images"]]
        return f"seed {seed}" if row is None else f"{row['question']} {row['label']} {row['metadata']['level']}"

    def step(self, response):
        self.count += 1
        self.hangs = response == "close hangs"
        if response == "third" and self.count % 3 == 0:
            raise RuntimeError(f"step {self.count}")
        return act(response)

    @tool
    def zoom(self, x: int, y: int = 0) -> Image.Image:
        """Enlarge the cell at x, y."""
        return Image.new("RGBA", (x, x), (x, y, 0, 255))

    @tool
    def act(self, what: str):
        """Do something."""
        return act(what)

    @tool
    def facts(self):
        """All facts."""
        return {"seed": self.seed, "list": [1, None]}

    @tool
    def fails(self):
        """Raise."""
        raise ValueError("not today")

    def close(self):
        if self.hangs:
            time.sleep(1000)


class Plain:
    def step(self, response):
        return act(response)


class Async(Sync):
    async def reset(self, row, seed):
        await asyncio.sleep(0)
        return Sync.reset(self, row, seed)

    async def step(self, response):
        if response == "wait":
            await asyncio.sleep(1000)
        if response == "ignore":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass
        if response == "cancelled":
            raise asyncio.CancelledError
        await asyncio.sleep(0.2 if response == "0.2 s" else 0)
        return Sync.step(self, response)

    @tool
    async def later(self, n: int):
        """Twice n."""
        await asyncio.sleep(0)
        return 2 * n

    async def close(self):
        await asyncio.sleep(0)


def loop(response):
    async def run():
        return response
    return Reply(asyncio.run(run()))


class OwnLoop:
    def step(self, response):
        return loop(response)


class NoStep:
    pass


class Asks:
    def reset(self, difficulty):
        pass
    def step(self, response):
        pass


class Two(Plain):
    def step(self, response, other):
        pass


class Untyped(Plain):
    @tool
    def grow(self, x):
        """Grow."""


class Undocumented(Plain):
    @tool
    def grow(self, x: int):
        pass


def broken():
    raise ValueError("no licence")


def leaves():
    os._exit(5)


async def later():
    return Sync()
'''


def environments(user_file: Path, make: str, **settings: Any) -> Environments:
    """The environments of a function of `ENVIRONMENTS`."""
    defaults: dict[str, Any] = {"num_workers": 1, "step_limit_s": 20.0, "limits": LIMITS}
    return Environments(f"{user_file}:{make}", **defaults | settings)


async def play(environment: OpenEnvironment, responses: Iterable[str]) -> list[str]:
    """The texts of an episode; an outcome that ends it is its last."""
    texts = []
    async with environment:
        try:
            texts.append(text_of(await environment.reset(None, 7)))
            for response in responses:
                texts.append(text_of(await environment.step(response)))
        except (EnvironmentRaised, EnvironmentLost) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def text_of(observation: Observation) -> str:
    """The only part of an observation."""
    (part,) = observation.parts
    assert isinstance(part, str)
    return part
