"""Remote calls of a role's methods, written as lambdas that mypy checks.

`group.call(lambda policy: policy.save_model(folder))`: mypy checks the call against the class of the role, which the
driver need not import. At run time the lambda gets a stand-in, which records the call for the role's process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A method of a role and its arguments."""

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Recorder:
    """Stand-in for a role, whose methods return the call as a `Call`."""

    def __getattr__(self, method: str) -> Callable[..., Call]:
        return lambda *args, **kwargs: Call(method, args, kwargs)


def record_call(function: Callable[..., Any], *arguments: Any) -> Call:
    """Return the one method call that `function` makes on its first argument, a role; the others are `arguments`."""
    call = function(_Recorder(), *arguments)
    assert isinstance(call, Call), "a remote call is one method call on the role and nothing else"
    return call
