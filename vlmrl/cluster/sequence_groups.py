"""Ranks that share the tokens of their passes: the groups of `ds.sequence_parallel_size`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from vlmrl.cluster.worker_group import Role_co, WorkerGroup

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def each_group(
    ranks: WorkerGroup[Role_co], function: Callable[[Role_co, _Item], _Result], items: Sequence[_Item]
) -> list[_Result]:
    """Make the call with `items[i]` on all ranks of group i, which are consecutive; returns one result per group.

    The ranks of a group return the same values, so those of its first rank are the group's.
    """
    size = len(ranks) // len(items)
    return ranks.each(function, [item for item in items for _ in range(size)])[::size]
