"""Calls of a role's methods, written as Python on the driver and made in the role's process.

`group.call(lambda policy: policy.save_model(folder))`: mypy checks the call against the class of the role, which the
driver need not import. At run time the function gets a stand-in that records the one call it makes.
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
    """Stands in for a role: a method call returns itself as a `Call`."""

    def __getattr__(self, method: str) -> Callable[..., Call]:
        return lambda *args, **kwargs: Call(method, args, kwargs)


def recorded(ask: Callable[..., Any], *arguments: Any) -> Call:
    """The call that `ask` makes of its first argument, a role; the others are `arguments`."""
    call = ask(_Recorder(), *arguments)
    assert isinstance(call, Call), "a remote call is one method of the role, and nothing around it"
    return call
