"""A policy and its critic in one process, with one cache of image features if their frozen towers are equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmrl.data.experience import Experience
from vlmrl.data.packing import Pack
from vlmrl.learning.critic import Critic
from vlmrl.learning.forward import ModelForward, RowsAndMetrics
from vlmrl.learning.policy import Policy
from vlmrl.learning.settings import PolicyAndCriticSettings
from vlmrl.learning.weights import gathered, split_by_bytes
from vlmrl.models.weight_buckets import device_digest, fingerprint
from vlmrl.observe.metrics import Metric
from vlmrl.types import Totals

_GATHER_BYTES = 1 << 28
"""Limit on the bytes of shards that are gathered at a time while the towers are compared."""


class PolicyAndCritic(Policy):
    """A `Policy` with the methods of a `Critic`, one per rank."""

    def __init__(self, settings: PolicyAndCriticSettings) -> None:
        super().__init__(settings.policy)
        self._critic = Critic(settings.critic)
        self._compare_towers()

    def shares_features(self) -> bool:
        """Whether policy and critic share cached image features: both towers are frozen, and equal."""
        return self._forward.shares_features(self._critic._forward)

    def values(self, packs: Sequence[Pack]) -> RowsAndMetrics:
        """See `Critic.values`."""
        return self._critic.values(packs)

    def update_values(
        self, work: Sequence[Sequence[tuple[Pack, Experience]]], totals: Sequence[Totals]
    ) -> list[dict[str, Metric]]:
        """See `Critic.update_values`."""
        return self._critic.update_values(work, totals)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        extra = super().load_checkpoint(folder)
        self._compare_towers()
        return extra

    def set_progress(self, share: float) -> None:
        super().set_progress(share)
        self._critic.set_progress(share)

    def save_critic_checkpoint(self, folder: Path) -> None:
        """See `Critic.save_critic_checkpoint`."""
        self._critic.save_critic_checkpoint(folder)

    def load_critic_checkpoint(self, folder: Path) -> None:
        """See `Critic.load_critic_checkpoint`."""
        self._critic.load_critic_checkpoint(folder)
        self._compare_towers()

    def save_critic(self, folder: Path) -> None:
        """See `Critic.save_critic`."""
        self._critic.save_critic(folder)

    def critic_table(self) -> list[Any]:
        """See `Critic.critic_table`."""
        return self._critic.critic_table()

    def _compare_towers(self) -> None:
        """Share one cache if the towers are equal, else give each model its own. A collective: it gathers shards."""
        ours, theirs = self._forward, self._critic._forward
        if ours.caches_features and theirs.caches_features:
            if _tower_fingerprint(ours) == _tower_fingerprint(theirs):
                ours.share_cache(theirs)
            else:
                ours.start_cache()
                theirs.start_cache()


def _tower_fingerprint(forward: ModelForward) -> str:
    """Fingerprint of tower and projector; the same on all ranks."""
    digests: dict[str, str] = {}
    for run in split_by_bytes(list(forward.tower.items()), max_bytes=_GATHER_BYTES):
        with gathered(run):
            digests |= {name: device_digest(name, parameter) for name, parameter in run}
    return fingerprint(digests)
