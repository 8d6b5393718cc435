"""Arguments of a model's forward pass for a pack of samples."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vlmrl.data.image_tokens import last_image_tokens
from vlmrl.data.packing import Pack, Piece, place
from vlmrl.errors import ConfigError
from vlmrl.models.attention import check_layers, isolates_samples
from vlmrl.models.attention_plan import AttentionPlan, Span, plan_attention
from vlmrl.models.expert_replay import place_experts
from vlmrl.models.linear_attention import follows_plan
from vlmrl.types import Bools, Ints, Sample
from vlmrl.video_size import VideoSize

if TYPE_CHECKING:
    from vlmrl.plugins import Processor


def model_inputs(
    net: PreTrainedModel,
    processor: Processor,
    pack: Pack,
    *,
    cached: Container[str] = frozenset(),
    replays_experts: bool = False,
) -> dict[str, Any]:
    """Make the arguments of `Scorer.forward` or `ValueModel.forward` for one pack of B rows and T tokens, on the CPU.

    * `input_ids` [B, T];
    * `position_ids` [B, T], each sample counted from 0; with M-RoPE [4, B, T], followed by the three rows of
      `get_rope_index`. Transformers separates packed samples by the first row only, and only without a KV cache: with
      three rows, or with the default cache, tokens attend to other samples without a warning. Responses that share a
      prompt continue its positions;
    * `use_cache` False;
    * `attention_mask` [B, T], if each row is one sample;
    * `attention_plan`, if rows hold several samples and attention or linear attention is that of this package, or if
      images attend in both directions;
    * `mm_token_type_ids` [B, T]; `token_type_ids` where Transformers makes a mask of them, in which images attend in
      both directions;
    * `pixel_values` [P, C] and `image_grid_thw` [n, 3] of the images and videos that are not `cached`, each once, or
      `pixel_values` of tiles and `image_tiles` [n] (`Processor.pixel_inputs`); `images`, their n content hashes;
      `image_places` and `video_places`, the content hashes of all images and of all videos in reading order;
    * `experts` [B, T, L, K], with `replays_experts`: those that the engine chose, if the samples have them;
    * `scored` [B, T]: the tokens of the loss, never the first of a sample; and `previous` [scored tokens]: the index
      in [B * T] of the state that predicts each of them.

    Raises ConfigError when the model cannot isolate samples in this layout.
    """
    check_layers(net, samples_share_rows=not pack.is_one_per_row)
    _check_branches(net, pack)
    images = _images(processor, pack, cached)
    inputs: dict[str, Any] = {
        "input_ids": place(pack, [sample.tokens for sample in pack.samples], fill=processor.pad_token_id),
        "position_ids": _position_ids(net, processor, pack),
        "use_cache": False,
        **_states_before(pack),
    }
    if pack.is_one_per_row:
        lengths = [np.ones(len(sample.tokens), dtype=np.int64) for sample in pack.samples]
        inputs["attention_mask"] = place(pack, lengths, fill=0)
    elif isolates_samples(net) or follows_plan(net):
        inputs["attention_plan"] = attention_plan(pack, processor)
    if processor.resize_factor is not None:
        types = place(pack, [processor.token_types(sample.tokens) for sample in pack.samples], fill=0)
        if not processor.attends_both_ways:
            inputs["mm_token_type_ids"] = types
        elif isolates_samples(net):
            inputs["attention_plan"] = attention_plan(pack, processor)
        else:
            inputs["token_type_ids"] = types
    if replays_experts and (experts := place_experts(pack)) is not None:
        inputs["experts"] = experts
    return inputs | images


def states_at(pack: Pack, marks: Sequence[Bools]) -> dict[str, Tensor]:
    """Make `scored` and `previous` for the tokens that `marks`, [T] per sample, marks, with the states at these tokens
    instead of those before them.

    A shared token is scored if one of its samples marks it: an empty response ends with its prompt.
    """
    whole = [mark.copy() for mark in marks]
    for row in pack.rows:
        for members, prefix in row:
            # For a shared prefix, `place` reads the first sample.
            whole[members[0]][:prefix] = np.any([marks[i][:prefix] for i in members], axis=0)
    scored = place(pack, whole, fill=False)
    return {"scored": scored, "previous": scored.flatten().nonzero()[:, 0]}


def attention_plan(pack: Pack, processor: Processor) -> AttentionPlan:
    """Plan attention over the rows of a pack, laid end to end. The padding behind a short row is a separate span."""
    _, width = pack.shape
    spans: list[Span] = []
    numbers: list[int] = []
    for i, piece in enumerate(pack.pieces):
        numbers.append(len(spans))
        parent = None if piece.parent is None else numbers[piece.parent]
        end = piece.start + piece.last - piece.first
        blocks = _blocks(processor, pack, piece) if processor.attends_both_ways else ()
        spans.append(Span(piece.row * width + piece.start, piece.last - piece.first, parent, blocks))
        is_last = i + 1 == len(pack.pieces) or pack.pieces[i + 1].row != piece.row
        if is_last and end < width:
            spans.append(Span(piece.row * width + end, width - end))
    return plan_attention(tuple(spans), causal=True)


def _blocks(processor: Processor, pack: Pack, piece: Piece) -> tuple[tuple[int, int], ...]:
    """(first token in the piece, length) of its images."""
    is_image = processor.token_types(pack.samples[piece.sample].tokens[piece.first : piece.last]) != 0
    edges = np.flatnonzero(np.diff(is_image, prepend=False, append=False)).reshape(-1, 2)
    return tuple((first, last - first) for first, last in edges.tolist())


def _check_branches(net: PreTrainedModel, pack: Pack) -> None:
    if any(branch.prefix for row in pack.rows for branch in row) and not isolates_samples(net):
        raise ConfigError(
            "train.layout shared needs an attention that supports shared prompts: set ds.attn_implementation to auto, "
            "or train.layout to packed"
        )


def _position_ids(net: PreTrainedModel, processor: Processor, pack: Pack) -> Tensor:
    text = place(pack, [np.arange(len(sample.tokens)) for sample in pack.samples], fill=0)
    if getattr(net.base_model, "get_rope_index", None) is None:
        return text
    rows = np.zeros((3, *pack.shape), dtype=np.int64)
    by_piece: list[Ints] = []
    for piece in pack.pieces:
        positions = _positions(net, processor, pack, piece, by_piece)
        row, columns = piece.place
        rows[:, row, columns] = positions
        by_piece.append(positions)
    return torch.cat([text[None], torch.from_numpy(rows)])


def _positions(net: PreTrainedModel, processor: Processor, pack: Pack, piece: Piece, previous: list[Ints]) -> Ints:
    """[3, length] M-RoPE positions in time, height and width of a piece; `previous` are those of earlier pieces."""
    sample = pack.samples[piece.sample]
    piece_tokens = sample.tokens[piece.first : piece.last]
    if piece.parent is not None and not processor.token_types(piece_tokens).any():
        # Text continues from the largest position before it, equally on all three axes.
        following: Ints = previous[piece.parent].max() + 1 + np.arange(len(piece_tokens))
        return np.broadcast_to(following, (3, len(piece_tokens)))
    sizes = [item.size for item in sample.media]
    if any(isinstance(size, VideoSize) for size in sizes):
        return processor.video_positions(sample.tokens, sizes)[:, piece.first : piece.last]
    tokens = torch.from_numpy(sample.tokens)[None]
    types = torch.from_numpy(processor.token_types(sample.tokens))[None]
    grids = torch.tensor([processor.grid(size) for size in sizes]) if sizes else None
    positions, _ = net.base_model.get_rope_index(tokens, types, image_grid_thw=grids)
    of_sample: Ints = positions[:, 0].numpy()
    return of_sample[:, piece.first : piece.last]


def _scored(sample: Sample) -> Bools:
    scored = sample.sampled.copy()
    scored[:1] = False
    return scored


def _states_before(pack: Pack) -> dict[str, Tensor]:
    """Make `scored` and `previous` for the sampled tokens. The state before the first token of a response that shares
    its prompt is that of the prompt's last token.
    """
    scored = place(pack, [_scored(sample) for sample in pack.samples], fill=False)
    _, width = pack.shape
    previous = []
    for piece in pack.pieces:
        index = piece.row * width + piece.start + np.arange(-1, piece.last - piece.first - 1)
        if piece.parent is not None:
            prompt = pack.pieces[piece.parent]
            index[0] = prompt.row * width + prompt.start + prompt.last - 1
        previous.append(index[_scored(pack.samples[piece.sample])[piece.first : piece.last]])
    return {"scored": scored, "previous": torch.from_numpy(np.concatenate(previous))}


def _images(processor: Processor, pack: Pack, cached: Container[str]) -> dict[str, Any]:
    if not pack.media:
        return {}
    new = [item for name, item in pack.media.items() if name not in cached]
    places = [name for piece in pack.pieces for name in _image_names(processor, pack, piece)]
    videos = {name for name, item in pack.media.items() if isinstance(item.size, VideoSize)}
    return {
        **processor.pixel_inputs(new),
        "images": tuple(item.hash for item in new),
        "image_places": tuple(name for name in places if name not in videos),
        "video_places": tuple(name for name in places if name in videos),
    }


def _image_names(processor: Processor, pack: Pack, piece: Piece) -> list[str]:
    """Content hashes of the images and videos whose tokens are in a piece."""
    sample = pack.samples[piece.sample]
    if not sample.media:
        return []
    places = last_image_tokens(sample.tokens, sample.media, processor, source=sample.source)
    inside = (places >= piece.first) & (places < piece.last)
    return [item.hash for item, is_inside in zip(sample.media, inside, strict=True) if is_inside]
