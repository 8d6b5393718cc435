"""The process of a theme: set up the checks' common state, run them in order, and send their outcomes to the parent.

python -P -m vlmrl.commands.self_test.child JSON
with JSON = '{"setup": ..., "functions": [...], "folder": ..., "parent": ..., "pipe": ...}'
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vlmrl import startup
from vlmrl.commands.self_test.outcome import Broken, Skipped
from vlmrl.system.lifeline import arm


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """The set-up of a theme whose checks share only a folder."""
    yield folder


def resolve(name: str) -> Callable[[Any], Any]:
    """Import the function that `module:function` names."""
    module, function = name.split(":")
    resolved: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    return resolved


def resolve_and_call(name: str, shared: Any) -> Any:
    """Import a check and run it on the theme's shared state, so that a failed import is its outcome too."""
    return resolve(name)(shared)


def outcome_of(function: Callable[[], Any]) -> dict[str, str]:
    """Run a check or a set-up; return its state, a figure, and the settings that avoid it if it names them."""
    try:
        return {"state": "ok", "figure": str(function() or "")}
    except Skipped as skipped:
        return {"state": "skipped", "figure": str(skipped)}
    except Broken as broken:
        return {"state": "failed", "figure": str(broken.args[0]), "avoid": broken.args[1] if broken.args[1:] else ""}
    except Exception as error:  # a library may raise anything: that is this check's outcome, and the others go on
        traceback.print_exc()
        text = " ".join(str(error).split())
        return {"state": "failed", "figure": f"{type(error).__name__}: {text}"[:300]}


def main(task: dict[str, Any]) -> int:
    """Run a theme; send one message for the set-up and one per check over the pipe."""
    arm(task["parent"])
    # An exception instead of sudden death lets the set-up end the processes that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    startup.prepare()
    pipe = Connection(task["pipe"], readable=False)

    def send(message: dict[str, str]) -> None:
        sys.stdout.flush()
        pipe.send_bytes(json.dumps(message).encode())

    shared: list[Any] = []
    with ExitStack() as stack:

        def set_up() -> None:
            shared.append(stack.enter_context(resolve(task["setup"])(Path(task["folder"]))))

        ready = outcome_of(set_up)
        send(ready)
        if ready["state"] == "ok":
            for name in task["functions"]:
                send(outcome_of(partial(resolve_and_call, name, shared[0])))
    return 0


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    # Threads of libraries may hang or abort when the interpreter exits, and all messages are sent.
    sys.stdout.flush()
    os._exit(code)
