"""The last line and the exit code of a command, whatever ends it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from vlmrl.errors import VlmrlError
from vlmrl.system.stops import Stopped


def exit_code(run: Callable[[], int], name: str) -> int:
    """What `run` returns, or the exit code of the error that ends it, which is printed as one line after `name`.

    2: a mistake of the user's or of the machine's; 130: interrupted; 143: ended by SIGTERM or SIGHUP.
    """
    try:
        return run()
    except VlmrlError as error:
        _print_last(f"{name}: {error}")
        return 2
    except Stopped as stop:
        _print_last(f"{name}: {stop}")
        return stop.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "vlmrl":
            raise
        print(
            f"vlmrl: the package {error.name} is not installed: run `make setup`, or pip install 'vlmrl[cpu]' or "
            "'vlmrl[gpu]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        _print_last("vlmrl: interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`vlmrl rl --help | head`); Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _print_last(line: str) -> None:
    """The last line of a run. Whether somebody can read it makes no difference to the exit code: the terminal may be
    closed, and `tee` have ended by the same Ctrl-C."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        # Python would try once more at exit, and change the code.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
