"""The memory of a process of a run, by kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One kind of memory of a role."""

    name: str
    num_bytes: float
    flag: str
    """Setting to change to reduce it, for messages."""
    in_host_memory: bool = False
    """It is in main memory, even if the role computes on a GPU."""
    stays: bool = True
    """It remains between the role's passes, while engines on the same GPU are awake."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Memory of one process of a run."""

    name: str
    parts: tuple[MemoryPart, ...]

    def num_bytes(self, *, on_device: bool = True) -> float:
        """Sum the parts on its device, or with False those in main memory."""
        return sum(part.num_bytes for part in self.parts if part.in_host_memory != on_device)
