"""Place the workers of all roles on nodes and slots, or raise an error that names the role to shrink.

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
    """Slots of one worker, all on one node."""
    flag: str
    """The setting that shrinks the role, for the error message."""
    workers_per_node: int | None = None
    """Maximum per node; None: as many as fit."""


@dataclass(frozen=True, slots=True)
class Place:
    """Node and slots of one worker."""

    node: int
    slots: tuple[int, ...]


def plan(
    roles: Sequence[Role],
    *,
    shared: Sequence[frozenset[str]],
    available: Sequence[int],
    unit: str,
    sharing: Sequence[str] = ("--train.colocate_all",),
) -> dict[str, list[Place]]:
    """Assign slots to all workers.

    Args:
        roles: the roles, in the order of placement.
        shared: sets of roles that use the same slots in turn.
        available: number of slots of each node.
        unit: name of a slot in messages: `GPU` or `CPU core`.
        sharing: settings by which more roles would share devices, for messages.

    Raises:
        ClusterError: a role does not fit; the message names it and the flag that shrinks it.
    """
    taken: dict[str, list[list[int]]] = {}
    places: dict[str, list[Place]] = {}
    for role in roles:
        pool = next((p for p in shared if role.name in p), frozenset({role.name}))
        users = sorted(pool)
        free = [
            [slot for slot in range(count) if not _is_taken(taken, node, slot, ignoring=users)]
            for node, count in enumerate(available)
        ]
        # Roles of one pool take turns, so each gets the pool's slots first, then free ones.
        usable = [_pool_first(free[node], taken, node, users) for node in range(len(available))]
        placed: list[Place] = []
        for node, slots in enumerate(usable):
            room = len(slots) // role.slots_per_worker
            if role.workers_per_node is not None:
                room = min(room, role.workers_per_node)
            for worker in range(min(room, role.num_workers - len(placed))):
                start = worker * role.slots_per_worker
                placed.append(Place(node, tuple(slots[start : start + role.slots_per_worker])))
        if len(placed) < role.num_workers:
            # Sharing is no help if the devices are shared already, or no other role has any.
            raise ClusterError(
                _no_room(role, placed, places, available, unit, () if pool.issuperset(places) else sharing)
            )
        places[role.name] = placed
        taken[role.name] = [[s for p in placed if p.node == node for s in p.slots] for node in range(len(available))]
    return places


def _is_taken(taken: Mapping[str, list[list[int]]], node: int, slot: int, *, ignoring: Sequence[str]) -> bool:
    return any(slot in nodes[node] for name, nodes in taken.items() if name not in ignoring)


def _pool_first(free: list[int], taken: Mapping[str, list[list[int]]], node: int, users: Sequence[str]) -> list[int]:
    pooled = {slot for name in users if name in taken for slot in taken[name][node]}
    return sorted(free, key=lambda slot: (slot not in pooled, slot))


def _no_room(
    role: Role,
    placed: Sequence[Place],
    places: Mapping[str, Sequence[Place]],
    available: Sequence[int],
    unit: str,
    sharing: Sequence[str],
) -> str:
    required, flag = role.num_workers * role.slots_per_worker, role.flag
    if role.workers_per_node is not None and role.num_workers > role.workers_per_node * len(available):
        flag = f"{role.flag.rpartition('.')[0]}.num_nodes"
    advice = f", or share devices with {' or '.join(sharing)}" if sharing else ""
    others = ", ".join(f"{name} {sum(len(p.slots) for p in of_role)}" for name, of_role in places.items())
    return (
        f"{role.name} requires {required} {unit}{'s' if required != 1 else ''} "
        f"({role.num_workers} x {role.slots_per_worker}) but only {len(placed)} of its {role.num_workers} workers fit "
        f"on {len(available)} node{'s' if len(available) != 1 else ''} with {sum(available)} in total"
        f"{f' (placed before it: {others})' if others else ''}: lower {flag}{advice}"
    )
