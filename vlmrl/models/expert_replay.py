"""Routing replay: passes of the trainer use the experts that the engine chose (R3, arXiv:2510.11370).

Close experts are chosen differently where engine and trainer round differently, and another expert moves a log-prob
more than rounding does. Replay takes the choice from the engine. The weights of the chosen experts are the trainer's, a
softmax of its own logits, so that the router still gets a gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.data.packing import Pack
from vlmrl.errors import ConfigError
from vlmrl.models.experts import routers


def place_experts(pack: Pack) -> Tensor | None:
    """Lay out the recorded experts of a pack's samples: [B, T, L, K], -1 where none was recorded; None without any.

    A shared prompt takes those of the first sample.
    """
    recorded = [sample.experts for sample in pack.samples if sample.experts is not None]
    if not recorded:
        return None
    out = np.full((*pack.shape, *recorded[0].shape[1:]), -1, dtype=np.int16)
    for piece in pack.pieces:
        experts = pack.samples[piece.sample].experts
        if experts is not None:
            found = experts[piece.first : piece.last]
            out[piece.row, piece.start : piece.start + len(found)] = found
    return torch.from_numpy(out)


class ExpertReplay:
    """The routers of a model, which choose the experts of `use` until it is called again: also when checkpointed layers
    are computed again in the backward pass."""

    def __init__(self, net: PreTrainedModel) -> None:
        self._experts: Tensor | None = None
        self._normalizes: dict[int, bool] = {}
        self._counts: list[Tensor] = []
        self._num_layers = 0
        for layer, router in enumerate(routers(net)):
            router.register_forward_hook(partial(self._replace, layer))
            self._num_layers = layer + 1

    def use(self, experts: Tensor | None) -> None:
        """Set the experts [B, T, L, K] of the next pass; None: the routers choose.

        Raises ConfigError when they are those of another model.
        """
        if experts is not None and experts.shape[2] != self._num_layers:
            raise ConfigError(
                f"the engine recorded the experts of {experts.shape[2]} layers, but the trainer's model has "
                f"{self._num_layers} layers with experts: they must be the same model"
            )
        self._experts = experts
        # Those of passes that nobody asked about, and of checkpointed layers computed again in the backward pass.
        self._counts = []

    def take_counts(self) -> Tensor:
        """[2] choices of one token in one layer since the last call, of the last pass only: those in which the trainer
        would have taken other experts, and all."""
        counts, self._counts = self._counts, []
        return torch.stack(counts).sum(0) if counts else torch.zeros(2)

    def _replace(self, layer: int, router: nn.Module, args: Any, output: Any) -> Any:
        del args
        if self._experts is None:
            return None
        if not _has_choice(output):
            raise ConfigError(
                f"algo.routing_replay: the routers of this model ({type(router).__name__}) do not give logits, weights "
                "and chosen experts: turn it off"
            )
        logits, scores, own = output
        if layer not in self._normalizes:
            self._normalizes[layer] = _normalizes(router, logits, scores, own)
        given = self._experts[:, :, layer].flatten(0, 1).to(own.dtype)
        is_given = given[:, :1] >= 0
        assert given.shape == own.shape, "experts must be placed for the pack that the model sees"
        chosen = torch.where(is_given, given, own)
        with torch.no_grad():
            differs = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
            self._counts.append(torch.stack([differs.sum(), is_given.sum()]).float())
        return logits, _weights(logits, chosen, normalizes=self._normalizes[layer]).to(scores.dtype), chosen


def _has_choice(output: Any) -> bool:
    """Whether a router gives logits, weights and chosen experts, in this order."""
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(part, Tensor) for part in output):
        return False
    logits, scores, own = output
    return logits.is_floating_point() and scores.is_floating_point() and not own.is_floating_point()


def _weights(logits: Tensor, chosen: Tensor, *, normalizes: bool) -> Tensor:
    """[N, K] weights of the chosen experts: their probabilities, which with `normalizes` sum to 1."""
    weights = logits.float().softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if normalizes else weights


@torch.no_grad()  # a checkpointed layer must do the same with a gradient when it is computed again
def _normalizes(router: nn.Module, logits: Tensor, scores: Tensor, own: Tensor) -> bool:
    """Whether the router's weights sum to 1. Raises ConfigError when they are not those of a softmax."""
    for normalizes in (True, False):
        if torch.allclose(_weights(logits, own, normalizes=normalizes).to(scores.dtype), scores, rtol=1e-2, atol=1e-3):
            return normalizes
    raise ConfigError(
        f"algo.routing_replay: the routers of this model ({type(router).__name__}) do not weigh experts by a softmax: "
        "turn it off"
    )
