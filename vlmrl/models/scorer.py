"""A model that scores tokens: log-probability and entropy of each, and no [T, V] logits on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.errors import ConfigError
from vlmrl.models.logprobs import ScoringHead, predictors

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class ScorerOutput(NamedTuple):
    """Of each token, laid out like the inputs; 0 on tokens that were not scored."""

    logprobs: Tensor
    """[B, T] log-probability of `input_ids[b, t]` given what its sample holds before it."""
    entropy: Tensor
    """[B, T] entropy, in nats, of the distribution that this token was drawn from."""


class Scorer(nn.Module):
    """Wraps a Hugging Face causal or vision-language model, `net`, whose parameters keep their names under `net.`

    Its output layer becomes a `ScoringHead`. Raises ConfigError for a model that does more than one linear layer
    between hidden states and logits.
    """

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        head = net.get_output_embeddings()
        text = net.config.get_text_config()
        scaled = [name for name in _CHANGES_LOGITS if getattr(text, name, None) not in (None, 1, 1.0)]
        if not isinstance(head, nn.Linear) or scaled:
            what = scaled[0] if scaled else "an output layer that is not linear"
            raise ConfigError(
                f"{type(net).__name__} has {what}, which its log-probabilities would ignore: use another model"
            )
        self.net = net
        ScoringHead.adopt(head)

    def forward(
        self, inputs: dict[str, Any], *, temperature: float = 1.0, banned: tuple[int, ...] = ()
    ) -> ScorerOutput:
        """Score the tokens that `inputs["scored"]` marks, under the tempered distribution without the banned tokens.

        Args:
            inputs: what `models.inputs.model_inputs` made, on the model's device.
        """
        inputs = dict(inputs)
        scored = inputs.pop("scored")
        occurrences = inputs.pop("image_occurrences", None)
        if occurrences is not None:
            inputs["mm_encoder_outputs"] = {"image": self._see(inputs, occurrences)}
        hidden = self.net.base_model(**inputs).last_hidden_state
        states, targets = predictors(hidden, inputs["input_ids"], scored)
        found = self.net.get_output_embeddings()(states, targets, temperature=temperature, banned=banned)
        return ScorerOutput(_scatter(found.logprobs, scored), _scatter(found.entropy, scored))

    def _see(self, inputs: dict[str, Any], occurrences: Tensor) -> Any:
        """Each image once through the vision tower; then its features wherever it occurs. Takes the pixels away."""
        pixels, grid = inputs.pop("pixel_values"), inputs.pop("image_grid_thw")
        features: Any = self.net.base_model.get_image_features(pixels, grid, return_dict=True)
        order = occurrences.tolist()
        features.pooler_output = tuple(features.pooler_output[i] for i in order)
        if "deepstack_features" in features:
            features.deepstack_features = [tuple(layer[i] for i in order) for layer in features.deepstack_features]
        return features


def _scatter(values: Tensor, scored: Tensor) -> Tensor:
    return torch.zeros(scored.shape, dtype=values.dtype, device=values.device).masked_scatter(scored, values)
