"""A model that scores tokens: log-probability and entropy of each, and no [T, V] logits on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.errors import ConfigError
from vlmrl.models.logprobs import ScoringHead

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class ScorerOutput(NamedTuple):
    """Of each token, laid out like the inputs; 0 on tokens that were not scored."""

    logprobs: Tensor
    """[B, T] log-probability of `input_ids[b, t]` given what its sample holds before it."""
    entropy: Tensor
    """[B, T] entropy, in nats, of the distribution that this token was drawn from."""


class ImageFeatures(NamedTuple):
    """What the vision tower and the projector make of one image."""

    rows: Tensor
    """[number of its tokens, D]"""
    deepstack: tuple[Tensor, ...] = ()
    """The same of earlier levels of the tower, for the families that have them (Qwen3-VL)."""


class Backbone(nn.Module):
    """Wraps a Hugging Face model, `net`, whose parameters keep their names under `net.`, for what is read off its
    hidden states: log-probabilities (`Scorer`) or values (`models.value_head.Valuer`).
    """

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        self.net = net

    def states(
        self, inputs: dict[str, Any], *, features: dict[str, ImageFeatures] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The hidden states [n, D] that belong to the scored tokens, and those tokens [n], row by row."""
        inputs = dict(inputs)
        scored, previous = inputs.pop("scored"), inputs.pop("previous")
        images, places = inputs.pop("images", ()), inputs.pop("image_places", ())
        if places:
            known = {} if features is None else features
            known = known | self._see(images, inputs.pop("pixel_values", None), inputs.pop("image_grid_thw", None))
            if features is not None:
                features |= {name: known[name] for name in images}
            inputs["mm_encoder_outputs"] = {"image": _laid_out([known[name] for name in places])}
        hidden = self.net.base_model(**inputs).last_hidden_state
        return hidden.flatten(0, 1)[previous], inputs["input_ids"][scored]

    def _see(self, names: tuple[str, ...], pixels: Tensor | None, grid: Tensor | None) -> dict[str, ImageFeatures]:
        """Each image once through the vision tower."""
        if pixels is None:
            return {}
        output: Any = self.net.base_model.get_image_features(pixels, grid, return_dict=True)
        levels = output.deepstack_features if "deepstack_features" in output else ()
        return {
            name: ImageFeatures(rows, tuple(level[i] for level in levels))
            for i, (name, rows) in enumerate(zip(names, output.pooler_output, strict=True))
        }


class Scorer(Backbone):
    """Wraps a causal or vision-language model, whose output layer becomes a `ScoringHead`.

    Raises ConfigError for a model that does more than one linear layer between hidden states and logits.
    """

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__(net)
        head = net.get_output_embeddings()
        text = net.config.get_text_config()
        scaled = [name for name in _CHANGES_LOGITS if getattr(text, name, None) not in (None, 1, 1.0)]
        if not isinstance(head, nn.Linear) or scaled:
            what = scaled[0] if scaled else "an output layer that is not linear"
            raise ConfigError(
                f"{type(net).__name__} has {what}, which its log-probabilities would ignore: use another model"
            )
        ScoringHead.adopt(head)

    def forward(
        self,
        inputs: dict[str, Any],
        *,
        temperature: float = 1.0,
        banned: tuple[int, ...] = (),
        features: dict[str, ImageFeatures] | None = None,
    ) -> ScorerOutput:
        """Score the tokens that `inputs["scored"]` marks, under the tempered distribution without the banned tokens.

        Args:
            inputs: what `models.inputs.model_inputs` made, on the model's device.
            features: what is known of images by content hash, when nothing that they come from trains; those of new
                images are added.
        """
        states, targets = self.states(inputs, features=features)
        found = self.net.get_output_embeddings()(states, targets, temperature=temperature, banned=banned)
        scored = inputs["scored"]
        return ScorerOutput(scattered(found.logprobs, scored), scattered(found.entropy, scored))


def _laid_out(images: list[ImageFeatures]) -> Any:
    """As Transformers' models take it: the images in the order of their places."""
    levels = tuple(zip(*(image.deepstack for image in images), strict=True))
    return SimpleNamespace(pooler_output=tuple(image.rows for image in images), deepstack_features=list(levels))


def scattered(values: Tensor, scored: Tensor) -> Tensor:
    """[n] values of the n tokens that `scored` [B, T] marks -> [B, T], 0 on the others."""
    return torch.zeros(scored.shape, dtype=values.dtype, device=values.device).masked_scatter(scored, values)
