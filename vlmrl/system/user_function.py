"""Load users' own functions, `path/to/file.py:function`, check their parameters, and format their errors.

For reward functions, estimators and policy losses. Imports nothing heavy, for the processes that score.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from vlmrl.errors import ConfigError
from vlmrl.system.plain_text import one_line

_MAX_MESSAGE_CHARS = 300


class Parameters(NamedTuple):
    """The parameters of a function."""

    names: frozenset[str]
    """Those that can be passed by name."""
    required: tuple[str, ...]
    """Those of `names` without a default, in order."""
    positional_only: tuple[str, ...]
    """Positional-only parameters without a default."""
    takes_all: bool
    """It has `**kwargs`."""

    def taken(self, offered: Collection[str]) -> frozenset[str]:
        """Return the `offered` arguments that the function declares; with `**kwargs` all of them."""
        return frozenset(offered) if self.takes_all else self.names.intersection(offered)

    def unmet(self, offered: Collection[str]) -> list[str]:
        """Parameters without a default that are not among the `offered` arguments, which are passed by name."""
        return [*self.positional_only, *(name for name in self.required if name not in offered)]


def parameters_of(function: Callable[..., Any], *, flag: str, name: str | None = None) -> Parameters:
    """Read the signature of a function. `flag` is its setting, and `name` its name, for messages.

    Raises:
        ConfigError: the signature cannot be read.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag}: the signature of {name or name_of(function)} cannot be read: {error}") from error
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return Parameters(
        names=frozenset(by_name),
        required=tuple(name for name, p in by_name.items() if p.default is p.empty),
        positional_only=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def declared(function: Callable[..., Any], offered: Collection[str], *, flag: str) -> frozenset[str]:
    """Return the `offered` arguments that a function declares; with `**kwargs` all of them. `flag` is its setting.

    Raises:
        ConfigError: it requires other arguments, or its signature cannot be read.
    """
    parameters = parameters_of(function, flag=flag)
    if unmet := parameters.unmet(offered):
        raise ConfigError(
            f"{flag}: {name_of(function)} requires {', '.join(unmet)}, which vlmrl does not pass; it may declare: "
            f"{', '.join(offered)}"
        )
    return parameters.taken(offered)


def name_of(function: Callable[..., Any]) -> str:
    """Return the function's name, for messages."""
    return getattr(function, "__name__", type(function).__name__)


def name_or_function(setting: str, flag: str) -> str | Callable[..., Any]:
    """Load the function if a setting has the form `path/to/file.py:name`; else return it: the name of a built-in one.

    A process loads each function once. `flag` is the setting's name, for messages. Raises ConfigError as
    `load_function` does.
    """
    return _loaded_once(setting, flag) if ".py:" in setting else setting


def load_function(spec: str, flag: str, *, default: tuple[str, str] | None = None) -> Callable[..., Any]:
    """Load the function that `path/to/file.py:name` names. `flag` is its setting, for messages. With `default`, a file
    without the first of these two names may have the second.

    Raises ConfigError when the file does not exist, does not import, or has no function of that name.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{flag}: {spec!r} should look like path/to/file.py:function")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{flag}: there is no file {file}")
    module = _import_file(path, flag)
    function = getattr(module, name, None)
    if function is None and default is not None and name == default[0]:
        function = getattr(module, default[1], None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        raise ConfigError(f"{flag}: {file} has no function {name}; it has: {', '.join(functions) or 'none'}")
    return cast("Callable[..., Any]", function)


_loaded_once = functools.cache(load_function)


def _import_file(path: Path, flag: str) -> ModuleType:
    # The name is the same in every process, so that objects of the file can be pickled by reference.
    module_name = f"vlmrl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything on import
        del sys.modules[module_name]
        raise ConfigError(f"{flag}: {path} does not import: {message_of(error)}") from error
    return module


def reason(error: BaseException, *, file: str | None = None) -> str:
    """Format an error of a user's function as `ValueError: its message (reward.py:12)`.

    The line is the last one in `file`, or the innermost one if the error did not pass through `file`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if file and os.path.realpath(frame.filename) == os.path.realpath(file)]
    frame = (in_file or frames)[-1]
    # A call that does not match the signature fails before the function's first line: the traceback ends at the caller.
    is_caller = frame.filename == frames[0].filename
    return message_of(error) + ("" if is_caller else f" ({os.path.relpath(frame.filename)}:{frame.lineno})")


def message_of(error: BaseException) -> str:
    """Format an error as `ValueError: its message` on one line."""
    kind = type(error).__name__
    try:
        message = one_line(" ".join(str(error).split()), max_chars=_MAX_MESSAGE_CHARS)
    except Exception:  # even the `__str__` of a user's exception may raise
        message = "?"
    return f"{kind}: {message}" if message else kind
