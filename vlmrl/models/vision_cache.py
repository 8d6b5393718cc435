"""Keeps what a frozen vision tower made of images: within bounds, and only for as long as the tower stays frozen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.models.scorer import ImageFeatures


class VisionCache:
    """Features by content hash, which covers pixels and resize settings, in CPU memory. The least recently used go
    first.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, max_bytes: int) -> None:
        """`parameters` are all that the features come from: tower and projector."""
        self._parameters = parameters
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, ImageFeatures] = OrderedDict()
        self.num_bytes = 0

    def take(self, names: Iterable[str], *, device: torch.device) -> dict[str, ImageFeatures]:
        """The features of those images that are held, on `device`.

        Raises VlmrlError when something that they come from trains: they would be of weights that are no more.
        """
        if any(parameter.requires_grad for parameter in self._parameters):
            raise VlmrlError(
                "image features are being kept while the vision tower or projector trains: freeze both with "
                "--actor.freeze_visual_encoder --actor.freeze_projector, or set --vision.cache_gib 0"
            )
        found = {}
        for name in names:
            if name in self._held:
                self._held.move_to_end(name)
                found[name] = _map(self._held[name], device)
        return found

    def put(self, features: Mapping[str, ImageFeatures]) -> None:
        """Hold these too.

        Raises ConfigError when one of them is larger than the whole cache: it would never do anything.
        """
        for name, new in features.items():
            size = _num_bytes(new)
            if size > self._max_bytes:
                raise ConfigError(
                    f"vision.cache_gib {self._max_bytes / 2**30:.3g} holds not even one image, which takes "
                    f"{size / 2**20:.1f} MiB: raise it, or turn the cache off with 0"
                )
            if name in self._held:
                self.num_bytes -= _num_bytes(self._held.pop(name))
            while self.num_bytes + size > self._max_bytes:
                _, oldest = self._held.popitem(last=False)
                self.num_bytes -= _num_bytes(oldest)
            self._held[name] = _own(new)
            self.num_bytes += size

    def clear(self) -> None:
        """The weights have changed."""
        self._held.clear()
        self.num_bytes = 0


def _num_bytes(features: ImageFeatures) -> int:
    return sum(level.nbytes for level in (features.rows, *features.deepstack))


def _map(features: ImageFeatures, device: torch.device) -> ImageFeatures:
    def moved(level: Tensor) -> Tensor:
        return level.to(device, non_blocking=True)

    return ImageFeatures(moved(features.rows), tuple(moved(level) for level in features.deepstack))


def _own(features: ImageFeatures) -> ImageFeatures:
    """On the CPU, without the graph, and not as views that would keep the features of other images alive."""

    def alone(level: Tensor) -> Tensor:
        return level.detach().to("cpu", copy=True)

    return ImageFeatures(alone(features.rows), tuple(alone(level) for level in features.deepstack))
