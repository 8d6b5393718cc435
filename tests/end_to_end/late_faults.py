"""vLLM workers whose adapters become wrong after the readback. vLLM imports them in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vlmrl.rollout.adapter_loader import AdapterUpdate
from vlmrl.rollout.reports import AdapterReport
from vlmrl.rollout.worker_extension import WeightReceiver


class Late(AdapterUpdate):
    """Reports correct layers, and then calls `spoil` on them."""

    @torch.no_grad()
    def complete(self) -> AdapterReport:
        before = [matrix.clone() for matrix in self.matrices()]
        report = super().complete()
        self.spoil(before)
        return report

    def matrices(self) -> Iterator[Tensor]:
        """Return all A and B in place, layer by layer."""
        for _, layer, _ in self._layers():
            yield from (*layer.lora_a_stacked, *layer.lora_b_stacked)

    def spoil(self, before: list[Tensor]) -> None:
        """Do nothing."""


class Ignores(Late):
    def spoil(self, before: list[Tensor]) -> None:
        for matrix in self.matrices():
            matrix.zero_()


class Keeps(Late):
    def spoil(self, before: list[Tensor]) -> None:
        for matrix, old in zip(self.matrices(), before, strict=True):
            matrix.copy_(old)


class AppliesTwice(Late):
    def spoil(self, before: list[Tensor]) -> None:
        for _, layer, _ in self._layers():
            for matrix in layer.lora_b_stacked:
                matrix.mul_(2)


class SwapsLayers(Late):
    def spoil(self, before: list[Tensor]) -> None:
        layers = {name: layer for name, layer, _ in self._layers()}
        for name, layer in layers.items():
            if ".layers.0." in name:
                other = layers[name.replace(".layers.0.", ".layers.1.")]
                mine, theirs = ((*each.lora_a_stacked, *each.lora_b_stacked) for each in (layer, other))
                for one, two in zip(mine, theirs, strict=True):
                    kept = one.clone()
                    one.copy_(two)
                    two.copy_(kept)


class Faulty(WeightReceiver):
    @torch.no_grad()
    def vlmrl_scale_layer(self, factor: float) -> None:
        """Multiply the output of one layer of the model."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        next(p for name, p in parameters.items() if name.endswith("layers.1.post_attention_layernorm.weight")).mul_(
            factor
        )

    def vlmrl_plant(self, fault: str) -> None:
        self.vlmrl_adapter_update: Any = globals()[fault]
