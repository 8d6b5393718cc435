"""A bounded cache of the image features of a frozen vision tower."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.models.scorer import ImageFeatures


class VisionCache:
    """Image features by content hash, which covers pixels and resize settings, in CPU memory; an LRU cache."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, max_bytes: int) -> None:
        """`parameters` are those that the features depend on: of tower and projector."""
        self._parameters = parameters
        self._max_bytes = max_bytes
        self._features: OrderedDict[str, ImageFeatures] = OrderedDict()
        self.num_bytes = 0

    def get(self, names: Iterable[str], *, device: torch.device) -> dict[str, ImageFeatures]:
        """Look up the features of the cached ones among these images; returns them on `device`.

        Raises VlmrlError when a parameter that they depend on trains: they would be outdated.
        """
        if any(parameter.requires_grad for parameter in self._parameters):
            raise VlmrlError(
                "image features are cached while the vision tower or projector trains: freeze both with "
                "--actor.freeze_visual_encoder --actor.freeze_projector, or set --vision.cache_gib 0"
            )
        cached = {}
        for name in names:
            if name in self._features:
                self._features.move_to_end(name)
                cached[name] = _to(self._features[name], device)
        return cached

    def put(self, features: Mapping[str, ImageFeatures]) -> None:
        """Add features.

        Raises ConfigError when those of one image exceed the whole cache: no image could ever be cached.
        """
        for name, new in features.items():
            size = _num_bytes(new)
            if size > self._max_bytes:
                raise ConfigError(
                    f"vision.cache_gib {self._max_bytes / 2**30:.3g} cannot hold a single image, which takes "
                    f"{size / 2**20:.1f} MiB: raise it, or turn the cache off with 0"
                )
            if name in self._features:
                self.num_bytes -= _num_bytes(self._features.pop(name))
            while self.num_bytes + size > self._max_bytes:
                _, oldest = self._features.popitem(last=False)
                self.num_bytes -= _num_bytes(oldest)
            self._features[name] = _copy_to_cpu(new)
            self.num_bytes += size

    def clear(self) -> None:
        """Drop all features, after the weights have changed."""
        self._features.clear()
        self.num_bytes = 0


def _num_bytes(features: ImageFeatures) -> int:
    return sum(level.nbytes for level in (features.rows, *features.deepstack))


def _to(features: ImageFeatures, device: torch.device) -> ImageFeatures:
    def move(level: Tensor) -> Tensor:
        return level.to(device, non_blocking=True)

    return ImageFeatures(move(features.rows), tuple(move(level) for level in features.deepstack))


def _copy_to_cpu(features: ImageFeatures) -> ImageFeatures:
    """Copy to the CPU, without the graph. Views would keep the features of other images alive."""

    def copy(level: Tensor) -> Tensor:
        return level.detach().to("cpu", copy=True)

    return ImageFeatures(copy(features.rows), tuple(copy(level) for level in features.deepstack))
