"""Call a user's estimator or policy loss, and check the tensor that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlmrl.errors import ConfigError
from vlmrl.system.user_function import declared, name_of, reason

UserFunction = Callable[..., Tensor]
"""A function from a user's file."""


def call(function: UserFunction, offered: Mapping[str, Any], *, shapes: Sequence[tuple[int, ...]], flag: str) -> Tensor:
    """Call a user's function with the `offered` arguments that it declares.

    Raises:
        ConfigError: it requires other arguments, raises, or does not return a tensor of numbers in one of the `shapes`.
    """
    names = declared(function, offered, flag=flag)
    try:
        returned: object = function(**{name: offered[name] for name in names})
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{flag}: {name_of(function)} failed: {reason(error)}") from error
    expected = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(returned, Tensor):
        raise ConfigError(f"{flag}: {name_of(function)} returned a {type(returned).__name__}, not a tensor {expected}")
    if tuple(returned.shape) not in shapes or returned.dtype is torch.bool:
        kind = str(returned.dtype).removeprefix("torch.")
        raise ConfigError(f"{flag}: {name_of(function)} returned {kind} {list(returned.shape)}, not numbers {expected}")
    return returned
