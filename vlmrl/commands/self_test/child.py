"""A theme's process: sets up what its checks share, runs them in order, and says of each what it found.

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
    """The set-up of a theme whose checks share nothing but a folder."""
    yield folder


def resolve(name: str) -> Callable[[Any], Any]:
    """The function behind `module:function`."""
    module, function = name.split(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    return found


def resolve_and_call(name: str, held: Any) -> Any:
    """A check's figure; what does not import is the check's fault too."""
    return resolve(name)(held)


def asked(function: Callable[[], Any]) -> dict[str, str]:
    """What a check, or a set-up, comes to: its state, a figure, and where it says so the settings that avoid it."""
    try:
        return {"state": "ok", "figure": str(function() or "")}
    except Skipped as skipped:
        return {"state": "skipped", "figure": str(skipped)}
    except Broken as broken:
        return {"state": "failed", "figure": str(broken.args[0]), "avoid": broken.args[1] if broken.args[1:] else ""}
    except Exception as error:  # whatever a library raises is this check's answer, and the others go on
        traceback.print_exc()
        text = " ".join(str(error).split())
        return {"state": "failed", "figure": f"{type(error).__name__}: {text}"[:300]}


def main(task: dict[str, Any]) -> int:
    """Answers over the pipe: one message for the set-up, one per check."""
    arm(task["parent"])
    # So that a stop lets the set-up end what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    startup.prepare()
    pipe = Connection(task["pipe"], readable=False)

    def tell(message: dict[str, str]) -> None:
        sys.stdout.flush()
        pipe.send_bytes(json.dumps(message).encode())

    held: list[Any] = []
    with ExitStack() as stack:

        def set_up() -> None:
            held.append(stack.enter_context(resolve(task["setup"])(Path(task["folder"]))))

        ready = asked(set_up)
        tell(ready)
        if ready["state"] == "ok":
            for name in task["functions"]:
                tell(asked(partial(resolve_and_call, name, held[0])))
    return 0


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    # Libraries with threads of their own may hang or abort at the end of the interpreter; all is said.
    sys.stdout.flush()
    os._exit(code)
