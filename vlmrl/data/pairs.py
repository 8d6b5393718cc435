"""Rows with a chosen and a rejected response, as pairs of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlmrl.data.columns import as_list, value_at
from vlmrl.data.image_source import ImageAccess
from vlmrl.data.media import InlineMedia
from vlmrl.data.order import RowIndex
from vlmrl.data.pair_rows import Side, read_margin, read_side
from vlmrl.data.prompts import PromptStream
from vlmrl.data.question import Question
from vlmrl.data.responses import check_response, sft_sample
from vlmrl.data.row_media import as_videos
from vlmrl.data.unusable import UnusableError, metadata_of, unusable_on_error
from vlmrl.types import Floats, Media, Prompt, Sample


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """N pairs of responses."""

    samples: list[Sample]
    """Sample 2i is the chosen response of pair i, and sample 2i + 1 the rejected one: their `group` is i, and their
    `response` 2i and 2i + 1."""
    margins: Floats
    """[N] by how much the chosen response is better; 0 where the data has none."""

    def __post_init__(self) -> None:
        if len(self.samples) != 2 * len(self.margins):
            raise ValueError(f"{len(self.samples)} responses of {len(self.margins)} pairs")

    def __len__(self) -> int:
        return len(self.margins)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PairPrompt(Prompt):
    """The prompt of a chosen response, with both responses."""

    chosen: Sample
    rejected: Sample
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairQuestion(Question):
    """The chosen response's columns, with the rejected one's."""

    rejected: Question
    has_same_images: bool
    margin: float


class PairStream(PromptStream):
    """Endless stream of rows with a chosen and a rejected response; see `PromptStream`. Its prompts are `PairPrompt`s.

    `columns` are `PairData`, and `requirements.pair` is set. A row is dropped if one of its responses cannot be used.
    """

    def _question(self, index: RowIndex, row: Mapping[str, Any]) -> Question:
        keys = self._keys[index.source]
        chosen, rejected = (read_side(row, keys, name) for name in ("chosen_key", "rejected_key"))
        column = as_list(value_at(row, keys["image_key"])), as_videos(value_at(row, keys["video_key"]))
        metadata = metadata_of(row, set(keys.values()))
        first, second = (self._side(side, column, metadata) for side in (chosen, rejected))
        return _PairQuestion(
            text=first.text,
            label=None,
            images=first.images,
            metadata=metadata,
            answer=first.answer,
            label_key=None,
            is_question=True,
            rejected=second,
            has_same_images=_are_same(first.images, second.images),
            margin=read_margin(row, keys["margin_key"]),
        )

    def _side(self, side: Side, column: tuple[Sequence[Any], Sequence[Any]], metadata: Mapping[str, Any]) -> Question:
        """`column`: the images and the videos of the row's columns."""
        images, videos = column
        question, sources = self._media_rules.gather(side.question, images, side.images, videos)
        return Question(
            text=question,
            label=None,
            images=sources,
            metadata=metadata,
            answer=side.response,
            label_key=None,
            is_question=True,
        )

    def _open(self, access: ImageAccess, question: Question) -> tuple[InlineMedia, ...] | UnusableError:
        """Open the images of the chosen response, then those of the rejected one if they are others."""
        assert isinstance(question, _PairQuestion)
        media = super()._open(access, question)
        if question.has_same_images or isinstance(media, UnusableError):
            return media
        others = super()._open(access, question.rejected)
        return others if isinstance(others, UnusableError) else (*media, *others)

    def _prompt(
        self, index: int, name: str, question: Question, media: Sequence[InlineMedia], shared: dict[str, Media]
    ) -> PairPrompt:
        assert isinstance(question, _PairQuestion)
        num_images = len(question.images)
        prompts = [
            super(PairStream, self)._prompt(index, name, side, images, shared)
            for side, images in (
                (question, media[:num_images]),
                (question.rejected, media if question.has_same_images else media[num_images:]),
            )
        ]
        chosen, rejected = (self._sample(prompt) for prompt in prompts)
        if _are_equal(chosen, rejected):
            raise UnusableError("chosen equals rejected", "both responses have the same tokens")
        shares_prompt = _are_equal(*prompts)
        chosen, rejected = (
            replace(sample, shares_prompt=shares_prompt, num_prompt_images=len(sample.media) if shares_prompt else None)
            for sample in (chosen, rejected)
        )
        fields = {field: getattr(prompts[0], field) for field in Prompt.__dataclass_fields__}
        return PairPrompt(**fields, chosen=chosen, rejected=rejected, margin=question.margin)

    def _sample(self, prompt: Prompt) -> Sample:
        assert prompt.answer is not None, "a side has a response"
        with unusable_on_error("response unusable"):
            prompt.answer.encode()  # raises on a lone surrogate
            check_response(prompt.answer, has_images=bool(prompt.media))
            sample = sft_sample(prompt, prompt.answer, self._processor)
        length = len(sample.tokens)
        if length > self._columns.max_len:
            raise UnusableError("too long", f"{length} tokens with a response, data.max_len is {self._columns.max_len}")
        return sample


def collate_pairs(prompts: Sequence[Prompt]) -> Pairs:
    """Number the pairs of a batch."""
    samples = []
    margins = []
    for number, prompt in enumerate(prompts):
        assert isinstance(prompt, PairPrompt), "pairs require requirements.pair"
        samples += [
            replace(sample, group=number, response=2 * number + place)
            for place, sample in enumerate((prompt.chosen, prompt.rejected))
        ]
        margins.append(prompt.margin)
    return Pairs(samples, np.array(margins, dtype=np.float32))


def _are_same(images: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists name the same images, as far as it shows without decoding them."""
    if len(images) != len(others):
        return False
    return all(
        a is b or (isinstance(a, str | bytes) and type(a) is type(b) and a == b)
        for a, b in zip(images, others, strict=True)
    )


def _are_equal(one: Prompt | Sample, other: Prompt | Sample) -> bool:
    """Whether tokens and images are equal."""
    return _hashes(one.media) == _hashes(other.media) and np.array_equal(one.tokens, other.tokens)


def _hashes(media: Sequence[Media]) -> list[str]:
    return [item.hash for item in media]
