"""Gives a user's own function what it asks for by name, and refuses one that cannot be given what it asks for."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmrl.errors import ConfigError

OwnFunction = Callable[..., Tensor]
"""A function from a user's file."""


def declared(function: OwnFunction, offered: Sequence[str], *, flag: str) -> frozenset[str]:
    """Which of the `offered` arguments a function takes; `**kwargs` takes all.

    Raises:
        ConfigError: it demands something else, or its signature cannot be read. `flag` is the setting it came from.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag}: the signature of {name_of(function)} cannot be read: {error}") from error
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    unknown = nameless + [n for n, p in by_name.items() if n not in offered and p.default is p.empty]
    if unknown:
        raise ConfigError(
            f"{flag}: {name_of(function)} asks for {', '.join(unknown)}; it is given, by name, what it declares of: "
            f"{', '.join(offered)}"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return frozenset(offered) if takes_all else frozenset(offered) & by_name.keys()


def call(function: OwnFunction, offered: Mapping[str, Any], *, shapes: Sequence[tuple[int, ...]], flag: str) -> Tensor:
    """What a user's function makes of those of the `offered` arguments that it declares.

    Raises:
        ConfigError: it raises, or does not return a tensor of numbers in one of the `shapes`.
    """
    names = declared(function, list(offered), flag=flag)
    try:
        found = function(**{name: offered[name] for name in names})
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{flag}: {name_of(function)} failed: {_reason(error)}") from error
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(found, Tensor):
        raise ConfigError(f"{flag}: {name_of(function)} returned a {type(found).__name__}; a tensor {wanted} is wanted")
    if tuple(found.shape) not in shapes or found.dtype is torch.bool:
        kind = str(found.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{flag}: {name_of(function)} returned {kind} {list(found.shape)}; numbers {wanted} are wanted"
        )
    return found


def name_of(function: OwnFunction) -> str:
    """What messages call it."""
    return getattr(function, "__name__", type(function).__name__)


def _reason(error: Exception) -> str:
    """`KeyError: 'x' (mine.py:12)`: the innermost line, whoever's it is."""
    lines = str(error).strip().splitlines()
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return f"{message} ({os.path.relpath(frame.filename)}:{frame.lineno})"
