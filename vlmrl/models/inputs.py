"""From a pack of samples to the arguments of a model's forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vlmrl.data.packing import Pack, place
from vlmrl.models.attention import check_layers, keeps_samples_apart
from vlmrl.types import Ints, Media, Sample

if TYPE_CHECKING:
    from vlmrl.plugins import Processor


def model_inputs(net: PreTrainedModel, processor: Processor, pack: Pack) -> dict[str, Any]:
    """The arguments of `Scorer.forward` for one pack, on CPU. B rows, T tokens of the longest row.

    * `input_ids` [B, T];
    * `position_ids`: [B, T], each sample counting from 0; with M-RoPE [4, B, T], the three rows of `get_rope_index`
      below them. Transformers tells packed samples apart by the first row alone, and only without a cache: with three
      rows, or with the default cache, tokens attend to other samples and nothing warns;
    * `use_cache` False;
    * `attention_mask` [B, T], when each row is one sample;
    * `cu_seq_lens_q`, `cu_seq_lens_k` [n + 1] and `max_length_q`, `max_length_k`, when samples lie end to end and the
      attention is that of `models.attention`;
    * `mm_token_type_ids` [B, T], `pixel_values` [P, C] and `image_grid_thw` [n, 3] of the images, each image once, and
      `image_occurrences` [m]: which image stands at each place for one, in reading order;
    * `scored` [B, T]: which tokens the loss wants, never the first of a sample.

    Raises ConfigError when the model cannot keep samples apart in this layout.
    """
    one_each = all(len(row) == 1 for row in pack.rows)
    check_layers(net, samples_share_rows=not one_each)
    grids = _Grids(processor, pack)
    inputs: dict[str, Any] = {
        "input_ids": place(pack, [sample.tokens for sample in pack.samples], fill=processor.pad_token_id),
        "position_ids": _position_ids(net, processor, pack, grids),
        "scored": place(pack, [_scored(sample) for sample in pack.samples], fill=False),
        "use_cache": False,
    }
    if one_each:
        lengths = [np.ones(len(sample.tokens), dtype=np.int64) for sample in pack.samples]
        inputs["attention_mask"] = place(pack, lengths, fill=0)
    elif keeps_samples_apart(net):
        inputs |= _lengths(pack)
    if processor.resize_factor is not None:
        types = [processor.token_types(sample.tokens) for sample in pack.samples]
        inputs["mm_token_type_ids"] = place(pack, types, fill=0)
    return inputs | grids.inputs


class _Grids:
    """The images of a pack, each once, and where they occur."""

    def __init__(self, processor: Processor, pack: Pack) -> None:
        unique: dict[str, int] = {}
        media: list[Media] = []
        occurrences: list[int] = []
        for i in (i for row in pack.rows for i in row):
            for item in pack.samples[i].media:
                if item.hash not in unique:
                    unique[item.hash] = len(media)
                    media.append(item)
                occurrences.append(unique[item.hash])
        self._index = unique
        self.inputs: dict[str, Tensor] = dict(processor.pixel_inputs(media)) if media else {}
        if media:
            self.inputs["image_occurrences"] = torch.tensor(occurrences)

    def of(self, sample: Sample) -> Tensor | None:
        """[n, 3] patches in time, height and width of the sample's images."""
        if not sample.media:
            return None
        return self.inputs["image_grid_thw"][[self._index[item.hash] for item in sample.media]]


def _position_ids(net: PreTrainedModel, processor: Processor, pack: Pack, grids: _Grids) -> Tensor:
    text = place(pack, [np.arange(len(sample.tokens)) for sample in pack.samples], fill=0)
    rope_index = getattr(net.base_model, "get_rope_index", None)
    if rope_index is None:
        return text
    rows: list[tuple[Ints, Ints, Ints]] = []
    for sample in pack.samples:
        tokens = torch.from_numpy(sample.tokens)[None]
        types = torch.from_numpy(processor.token_types(sample.tokens))[None]
        positions, _ = rope_index(tokens, types, image_grid_thw=grids.of(sample))
        rows.append(tuple(positions[:, 0].numpy()))
    return torch.stack([text, *(place(pack, [row[axis] for row in rows], fill=0) for axis in range(3))])


def _scored(sample: Sample) -> np.ndarray[Any, np.dtype[np.bool_]]:
    scored = sample.sampled.copy()
    scored[:1] = False
    return scored


def _lengths(pack: Pack) -> dict[str, Any]:
    """Where samples begin and end in the rows laid end to end; padding behind a short row counts as one more sample."""
    _, width = pack.shape
    lengths: list[int] = []
    for row in pack.rows:
        own = [len(pack.samples[i].tokens) for i in row]
        rest = width - sum(own)
        lengths += [*own, rest] if rest else own
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = max(lengths)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
