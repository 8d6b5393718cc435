"""Log-probability and entropy of each token of a model, without [T, V] logits."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.errors import ConfigError
from vlmrl.models.attention_check import checked_attention
from vlmrl.models.divergence import TeacherRows, token_divergence
from vlmrl.models.expert_replay import ExpertReplay
from vlmrl.models.logprobs import ScoringHead
from vlmrl.models.sequence import SequenceGroup, SequenceShard, sliced_inputs, sum_once

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class ScorerOutput(NamedTuple):
    """Outputs per token in the layout of the inputs; 0 on tokens that are not scored."""

    logprobs: Tensor
    """[B, T] log-probability of `input_ids[b, t]` given the tokens of its sample before it."""
    entropy: Tensor
    """[B, T] entropy, in nats, of the distribution that this token was sampled from."""
    divergence: Tensor | None = None
    """[B, T] KL divergence of the distribution and a teacher's; None without a teacher."""


class ImageFeatures(NamedTuple):
    """Outputs of vision tower and projector for one image or video."""

    rows: Tensor
    """[its tokens, D]"""
    deepstack: tuple[Tensor, ...] = ()
    """[its tokens, D] each: outputs of earlier layers of the tower, in families that use them (Qwen3-VL)."""


class Backbone(nn.Module):
    """Wrapper of a Hugging Face model, `net`, that returns its hidden states at scored tokens.

    The base of `Scorer` and `models.value_head.ValueModel`. Parameters keep their names under `net.`.
    """

    def __init__(self, net: PreTrainedModel, sequence: SequenceGroup | None = None) -> None:
        """`sequence`: ranks that share the tokens of every pass, which they make together."""
        super().__init__()
        self.net = net
        self._sequence = sequence
        self._unchecked = {True, False}
        """Passes that are still to be checked for how the layers attend: those with rows of one sample, and others."""
        self.expert_replay: ExpertReplay | None = None
        """Present once a pass has replayed experts."""

    def states(
        self, inputs: dict[str, Any], *, features: dict[str, ImageFeatures] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the hidden states [n, D] that predict the n scored tokens, and these tokens [n], row by row.

        With a sequence group, only those of the states that this rank has.
        """
        inputs, shard = dict(inputs), self._shard(inputs)
        scored, previous = inputs.pop("scored"), inputs.pop("previous")
        images = inputs.pop("images", ())
        places = {kind: inputs.pop(f"{kind}_places", ()) for kind in ("image", "video")}
        if any(places.values()):
            by_hash = {} if features is None else features
            tiles = inputs.pop("image_tiles", None)
            by_hash = by_hash | self._encode(
                images, inputs.pop("pixel_values", None), inputs.pop("image_grid_thw", None), tiles
            )
            if features is not None:
                features |= {name: by_hash[name] for name in images}
            inputs["mm_encoder_outputs"] = {
                kind: _encoder_outputs([by_hash[name] for name in names], has_tiles=tiles is not None)
                for kind, names in places.items()
                if names
            }
        experts = inputs.pop("experts", None)
        if experts is not None and shard is not None:
            experts = shard.take(experts + 1, 1) - 1  # none on padding
        if experts is not None and self.expert_replay is None:
            self.expert_replay = ExpertReplay(self.net)
        if self.expert_replay is not None:
            self.expert_replay.use(experts)
        if shard is None:
            hidden = self._last_states(inputs)
            return hidden.flatten(0, 1)[previous], inputs["input_ids"][scored]
        with sliced_inputs(self.net, shard):
            hidden = self.net.base_model(**inputs, sequence_shard=shard).last_hidden_state
        shard.check_exchanges(self.net)
        is_own, own_places = shard.owned(previous)
        return hidden.flatten(0, 1)[own_places], inputs["input_ids"][scored][is_own]

    def _last_states(self, inputs: dict[str, Any]) -> Tensor:
        is_one_per_row = "attention_mask" in inputs
        if is_one_per_row not in self._unchecked:
            return self.net.base_model(**inputs).last_hidden_state
        with checked_attention(self.net, inputs):
            hidden = self.net.base_model(**inputs).last_hidden_state
        self._unchecked.remove(is_one_per_row)
        return hidden

    def scatter(self, values: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Scatter a value for each of `states` into [B, T], with 0 on tokens that are not scored. With a sequence
        group, the values of all its ranks."""
        shard = self._shard(inputs)
        if shard is not None:
            is_own, _ = shard.owned(inputs["previous"])
            values = shard.gather(values, is_own)
        return scatter_scored(values, inputs["scored"])

    def take_replay_counts(self) -> Tensor:
        """[2] replayed choices of the last pass, if it was not asked before: those that replaced another, and all. With
        a sequence group, those of all its ranks: a collective."""
        if self.expert_replay is None:
            return torch.zeros(2)
        counts = self.expert_replay.take_counts().to(self.net.device)
        return counts if self._sequence is None else sum_once(counts, self._sequence)

    def _shard(self, inputs: dict[str, Any]) -> SequenceShard | None:
        return None if self._sequence is None else SequenceShard(self._sequence, inputs["input_ids"].shape[1])

    def _encode(
        self, names: tuple[str, ...], pixels: Tensor | None, grid: Tensor | None, tiles: Tensor | None
    ) -> dict[str, ImageFeatures]:
        """Run each image and video once through the vision tower, which takes both alike."""
        if pixels is None:
            return {}
        if tiles is not None:
            output: Any = self.net.base_model.get_image_features(pixels, return_dict=True)
            of_images = output.pooler_output.split(tiles.tolist())
            return {name: ImageFeatures(rows.flatten(0, 1)) for name, rows in zip(names, of_images, strict=True)}
        output = self.net.base_model.get_image_features(pixels, grid, return_dict=True)
        levels = output.deepstack_features if "deepstack_features" in output else ()
        return {
            name: ImageFeatures(rows, tuple(level[i] for level in levels))
            for i, (name, rows) in enumerate(zip(names, output.pooler_output, strict=True))
        }


class Scorer(Backbone):
    """Wrapper of a text or vision-language model that scores tokens. The model's output layer becomes a `ScoringHead`.

    Raises ConfigError for a model whose logits are more than a linear function of the hidden states.
    """

    def __init__(self, net: PreTrainedModel, sequence: SequenceGroup | None = None) -> None:
        super().__init__(net, sequence)
        ScoringHead.adopt(linear_head(net))

    def forward(
        self,
        inputs: dict[str, Any],
        *,
        temperature: float = 1.0,
        banned: tuple[int, ...] = (),
        features: dict[str, ImageFeatures] | None = None,
        teacher: TeacherRows | None = None,
    ) -> ScorerOutput:
        """Score the tokens that `inputs["scored"]` marks, under the tempered distribution without the banned tokens.

        Args:
            inputs: result of `models.inputs.model_inputs`, on the model's device.
            features: cached features by content hash; those of new images are added. Pass them only if tower and
                projector are frozen.
            teacher: a teacher's side of the divergence, for the scored tokens row by row. The divergence is of the
                distributions at temperature 1, without bans.
        """
        states, targets = self.states(inputs, features=features)
        also = None if teacher is None else partial(token_divergence, teacher=teacher)
        output = self.net.get_output_embeddings()(states, targets, temperature=temperature, banned=banned, also=also)
        return ScorerOutput(*(self.scatter(values, inputs) for values in output))


def linear_head(net: PreTrainedModel) -> nn.Linear:
    """Return the output layer. Raises ConfigError for a model whose logits are more than a linear function of the
    hidden states."""
    head = net.get_output_embeddings()
    text = net.config.get_text_config()
    scaled = [name for name in _CHANGES_LOGITS if getattr(text, name, None) not in (None, 1, 1.0)]
    if not isinstance(head, nn.Linear) or scaled:
        feature = scaled[0] if scaled else "an output layer that is not linear"
        raise ConfigError(
            f"{type(net).__name__} has {feature}, which its log-probabilities would ignore: use another model"
        )
    return head


def _encoder_outputs(images: list[ImageFeatures], *, has_tiles: bool) -> Any:
    """Return the features in the form that Transformers' models take, in reading order."""
    if has_tiles:
        # [tiles, tokens, D]: tiles of one token each are right for every model, whatever its number per tile.
        return SimpleNamespace(pooler_output=torch.cat([image.rows for image in images])[:, None])
    levels = tuple(zip(*(image.deepstack for image in images), strict=True))
    return SimpleNamespace(pooler_output=tuple(image.rows for image in images), deepstack_features=list(levels))


def scatter_scored(values: Tensor, scored: Tensor) -> Tensor:
    """Scatter the values [n] of the n tokens that `scored` [B, T] marks into [B, T], with 0 on the others."""
    return torch.zeros(scored.shape, dtype=values.dtype, device=values.device).masked_scatter(scored, values)
