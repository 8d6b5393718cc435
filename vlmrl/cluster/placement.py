"""Who runs where. Pure arithmetic: it either fits, or it names the role to shrink; it never waits.

A slot is one GPU, or one CPU core on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmrl.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Role:
    """One role of a run."""

    name: str
    num_workers: int
    slots_per_worker: int
    """Slots of one worker; they lie on one node."""
    flag: str
    """The setting that makes it smaller, for the error message."""
    workers_per_node: int | None = None
    """At most so many on one node; None: as many as fit."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker runs."""

    node: int
    slots: tuple[int, ...]


def plan(
    roles: Sequence[Role], *, shared: Sequence[frozenset[str]], available: Sequence[int], unit: str
) -> dict[str, list[Place]]:
    """Give every worker its slots.

    Args:
        roles: what wants to run, in the order in which it is placed.
        shared: sets of roles that use the same slots one after the other.
        available: slots of each node.
        unit: what a slot is called in messages: `GPU` or `CPU core`.

    Raises:
        ClusterError: a role does not fit; the line names it and the flag that shrinks it.
    """
    taken: dict[str, list[list[int]]] = {}
    places: dict[str, list[Place]] = {}
    for role in roles:
        pool = next((p for p in shared if role.name in p), frozenset({role.name}))
        users = sorted(pool)
        free = [
            [slot for slot in range(count) if not _is_taken(taken, node, slot, besides=users)]
            for node, count in enumerate(available)
        ]
        # Roles of one pool alternate, so each sees the pool's slots first and fresh ones after them.
        mine = [_pool_first(free[node], taken, node, users) for node in range(len(available))]
        found: list[Place] = []
        for node, slots in enumerate(mine):
            room = len(slots) // role.slots_per_worker
            if role.workers_per_node is not None:
                room = min(room, role.workers_per_node)
            for worker in range(min(room, role.num_workers - len(found))):
                start = worker * role.slots_per_worker
                found.append(Place(node, tuple(slots[start : start + role.slots_per_worker])))
        if len(found) < role.num_workers:
            raise ClusterError(_no_room(role, found, places, available, unit, pool))
        places[role.name] = found
        taken[role.name] = [[s for p in found if p.node == node for s in p.slots] for node in range(len(available))]
    return places


def _is_taken(taken: Mapping[str, list[list[int]]], node: int, slot: int, *, besides: Sequence[str]) -> bool:
    return any(slot in nodes[node] for name, nodes in taken.items() if name not in besides)


def _pool_first(free: list[int], taken: Mapping[str, list[list[int]]], node: int, users: Sequence[str]) -> list[int]:
    pooled = {slot for name in users if name in taken for slot in taken[name][node]}
    return sorted(free, key=lambda slot: (slot not in pooled, slot))


def _no_room(
    role: Role,
    found: Sequence[Place],
    places: Mapping[str, Sequence[Place]],
    available: Sequence[int],
    unit: str,
    pool: frozenset[str],
) -> str:
    wanted, flag = role.num_workers * role.slots_per_worker, role.flag
    if role.workers_per_node is not None and role.num_workers > role.workers_per_node * len(available):
        flag = f"{role.flag.rpartition('.')[0]}.num_nodes"
    others = ", ".join(f"{name} {sum(len(p.slots) for p in placed)}" for name, placed in places.items())
    return (
        f"{role.name} wants {wanted} {unit}{'s' if wanted != 1 else ''} "
        f"({role.num_workers} x {role.slots_per_worker}) but only {len(found)} of its {role.num_workers} workers fit "
        f"on {len(available)} node{'s' if len(available) != 1 else ''} with {sum(available)} in all"
        f"{f' (placed before it: {others})' if others else ''}: lower {flag}"
        # Of no use where they are shared already, and where no other role takes any.
        f"{'' if pool.issuperset(places) else ', or share devices with --train.colocate_all'}"
    )
