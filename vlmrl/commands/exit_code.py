"""The last line and the exit code of a command, for every way that it can end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from vlmrl.errors import MachineError, VlmrlError
from vlmrl.system.stops import Stopped

_MACHINE_MISSING = 75


def exit_code(run: Callable[[], int], name: str) -> int:
    """Call `run`; return its result, or the exit code of its error, which is printed as one line after `name`.

    Exit codes of errors: 2 for settings, data or the machine; 75 for another machine of the run that is gone or
    missing (sysexits.h: try again later); 130 when interrupted; 143 for SIGTERM or SIGHUP.
    """
    try:
        return run()
    except VlmrlError as error:
        _print_last(f"{name}: {error}")
        return _MACHINE_MISSING if isinstance(error, MachineError) else 2
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
        # The reader of our output has ended (`vlmrl rl --help | head`). Python would print an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _print_last(line: str) -> None:
    """Print the last line, if there is still a reader: the terminal may be closed, or the same Ctrl-C ended `tee`."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        # Python would try again at exit, and change the exit code.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
