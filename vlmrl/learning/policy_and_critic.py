"""A policy and its critic in one process, which look at an image once where their towers are frozen and the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmrl.data.packing import Pack
from vlmrl.learning.critic import Critic
from vlmrl.learning.forward import Passes, Scored
from vlmrl.learning.policy import Policy
from vlmrl.learning.settings import PolicyAndCriticSettings
from vlmrl.learning.weights import cut, gathered
from vlmrl.models.checksum import device_digest
from vlmrl.models.weights import fingerprint
from vlmrl.observe.metrics import Metric
from vlmrl.types import Experience, Totals

_GATHER_BYTES = 1 << 28
"""Most bytes of sharded parameters that are made whole at a time while towers are compared."""


class PolicyAndCritic(Policy):
    """One per rank: a `Policy`, with the methods of a `Critic` beside its own."""

    def __init__(self, settings: PolicyAndCriticSettings) -> None:
        super().__init__(settings.policy)
        self._critic = Critic(settings.critic)
        self._compare_towers()

    def shares_features(self) -> bool:
        """Whether what one of them has made of an image is known to the other: both towers are frozen, and the same."""
        return self._forward.shares_features(self._critic._forward)

    def values(self, packs: Sequence[Pack]) -> Scored:
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

    def follow(self, share: float) -> None:
        super().follow(share)
        self._critic.follow(share)

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
        """Let both look for features in one place, or each in its own. A collective: it gathers what is sharded."""
        ours, theirs = self._forward, self._critic._forward
        if ours.keeps_features and theirs.keeps_features:
            if _tower_fingerprint(ours) == _tower_fingerprint(theirs):
                ours.share_features(theirs)
            else:
                ours.keep_features()
                theirs.keep_features()


def _tower_fingerprint(passes: Passes) -> str:
    """Of every number that the features of an image come from; the same on every rank."""
    digests: dict[str, str] = {}
    for run in cut(list(passes.tower.items()), max_bytes=_GATHER_BYTES):
        with gathered(run):
            digests |= {name: device_digest(name, parameter) for name, parameter in run}
    return fingerprint(digests)
