"""The environment of examples/agents/steer.py for a policy that cannot see what comes of its moves."""

from functools import cache
from pathlib import Path
from typing import Any

from vlmrl.system.user_function import load_function

STEER = Path(__file__).parents[2] / "examples" / "agents" / "steer.py"
make_small = load_function(f"{STEER}:make_small", "train.agent_func_path")


def first_picture() -> Any:
    """Repeats the episode's first picture."""
    steer = make_small()
    steer.picture = cache(steer.picture)
    return steer


def constant_picture() -> Any:
    """Shows the same picture in every turn of every episode."""
    steer, other = make_small(), make_small()
    other.at, other.goal = (0, 0), (3, 3)
    picture = other.picture()
    steer.picture = lambda: picture
    return steer
