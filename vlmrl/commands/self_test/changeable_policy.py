"""A policy whose weights the self-test changes without training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vlmrl.learning.policy import Policy
from vlmrl.models.adapters import adapter_tensors


class ChangeablePolicy(Policy):
    """A policy whose weights can be changed without training."""

    _kept: Mapping[str, Tensor] | None = None

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the base weights by a factor; `restore` undoes it."""
        named = {name: p for name, p in self._net.named_parameters() if ".lora_" not in name}
        self._kept = {name: p.detach().clone() for name, p in named.items()}
        for parameter in named.values():
            parameter.mul_(factor)
        # Image features are cached, because the base does not train.
        self._forward.clear_cache()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the weights from before `scale`, bit for bit."""
        assert self._kept is not None, "nothing was scaled"
        named = dict(self._net.named_parameters())
        for name, kept in self._kept.items():
            named[name].copy_(kept)
        self._forward.clear_cache()

    @torch.no_grad()
    def randomize_adapter(self, seed: int) -> None:
        """Give the adapter random weights with a visible effect."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in adapter_tensors(self._net):
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
