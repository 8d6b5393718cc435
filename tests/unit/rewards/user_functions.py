"""Reward functions of a user, valid and invalid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlmrl.config.reward import Reward
from vlmrl.rewards.rewarder import Rewarder
from vlmrl.types import Group

FUNCTIONS = """
import os, time, sys
import numpy as np

def length(response): return len(response)
def parts(response): return {"total": 2.0, "a b": 1, "c": True}
def everything(prompt, response, label, images, metadata):
    pixel = images[0].getpixel((0, 0))
    images[0].putpixel((0, 0), (9, 9, 9))
    seen = (prompt, label, images[0].size, pixel, metadata["family"])
    return float(seen == ("how many?", "7", (5, 4), (1, 2, 3), "x"))
def safe_path(response): return float("PYTHONSAFEPATH" in os.environ)
def by_keyword(response, **known): return float(sorted(known) == ["label", "metadata", "prompt"])
def numpy_number(response): return np.float32(0.5)

def raises(response):
    if response == "bad":
        raise ValueError("cannot\\nscore this")
    return 1.0
def hangs(response):
    while response == "bad":
        time.sleep(0.01)
    return 1.0
def holds_on(response):
    while response == "bad":
        try:
            time.sleep(0.01)
        except BaseException:
            pass
    return 1.0
def dies(response):
    if response == "bad":
        os._exit(3)
    return 1.0
def leaves(response):
    if response == "bad":
        sys.exit("bye")
    return 1.0
def returns(response): return {"nan": float("nan"), "inf": float("inf"), "none": None, "list": [1.0, 2.0], "text": "1",
    "array": np.ones(3), "dict": {"score": 1.0}, "huge": 10**400, "part": {"total": 1.0, "c": [1]}}.get(response, 1.0)
def slow(response):
    time.sleep(0.6)
    return len(response)
def dies_later(response):
    import threading
    threading.Timer(0.2, os._exit, (1,)).start()
    return 1.0
def talks(response):
    print("I see", response)
    os.write(2, b"natively\\n")
    if response == "bad":
        os.kill(os.getpid(), 9)
    return 1.0
async def later(response): return 1.0
def forks(response):
    if os.fork() == 0:
        time.sleep(10)
        os._exit(0)
    return 1.0
def starts(response):
    import subprocess
    program = subprocess.Popen(["sleep", "60"])
    with open(f"{__file__}.pids", "a") as file:
        print(program.pid, file=file)
    program.wait()
def stays(response):
    mark = f"{__file__}.{response}"
    if not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(3)
    import threading
    threading.Thread(target=time.sleep, args=(20,)).start()
    return 1.0

calls = 0
def once(response):
    global calls
    calls += 1
    mark = f"{__file__}.{response}"
    if response != "good" and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), 9) if response == "death" else time.sleep(60)
    return calls if response != "good" else 1.0
def offline(response):
    if response == "bad":
        raise ConnectionRefusedError("nobody listens")
    return 1.0
def wrapped(response):
    try:
        return offline(response)
    except OSError as error:
        raise RuntimeError("no scorer") from error

def elsewhere(completions, completion_ids): return [1.0]
def asks(response, difficulty): return 1.0
def blind(prompt): return 1.0
"""


def user_rewarder(file: Path, function: str, **settings: object) -> Rewarder:
    """A rewarder with only a function of the file."""
    reward = Reward.model_validate({"functions": {}, "remote_url": f"{file}:{function}"} | settings)
    return Rewarder(reward)


async def totals(rewarder: Rewarder, groups: Sequence[Group]) -> list[list[float]]:
    async with rewarder:
        return [[score.total for score in scores] for scores in await rewarder.score(groups)]
