"""Image and video tokens of a sequence: one per merged patch, as the model reads them, or one per item, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmrl.errors import DataError
from vlmrl.plugins import Processor
from vlmrl.types import Bools, Ints, Media


def last_image_tokens(tokens: Ints, media: Sequence[Media], processor: Processor, *, source: str = "") -> Ints:
    """Return the position of the last token of each image and video. `source` names the sequence, for messages.

    Raises:
        DataError: the image and video tokens are not those of these images and videos.
    """
    places = np.flatnonzero(processor.token_types(tokens))
    counts = np.array([processor.num_tokens(item.size) for item in media], dtype=np.int64)
    ends = counts.cumsum()
    if len(places) != counts.sum():
        raise DataError(
            f"{source or 'a sample'} has {len(places)} image tokens, but its {len(media)} images take {counts.sum()}: "
            "the model would see none of them, or wrong ones"
        )
    for number, (item, of_item) in enumerate(zip(media, np.split(places, ends[:-1]), strict=False)):
        inside = np.flatnonzero(processor.token_types(processor.expansion(item.size)))
        if not np.array_equal(of_item - of_item[0], inside - inside[0]):
            raise DataError(
                f"{source or 'a sample'}: the tokens of its image {number + 1} are not side by side: the model would "
                "see it in parts"
            )
    last: Ints = places[ends - 1]
    return last


def tokens_of_media(tokens: Ints, media: Sequence[Media], processor: Processor, *, source: str = "") -> Bools:
    """Return which tokens stand for images and videos, [T]; the times between the frames of a video are among them.

    Raises DataError as `last_image_tokens` does.
    """
    inside: Bools = np.zeros(len(tokens), dtype=np.bool_)
    for item, last in zip(media, last_image_tokens(tokens, media, processor, source=source).tolist(), strict=True):
        expansion = processor.expansion(item.size)
        num_behind = len(expansion) - 1 - int(np.flatnonzero(processor.token_types(expansion))[-1])
        end = last + num_behind + 1
        inside[end - len(expansion) : end] = True
    return inside


def collapse(tokens: Ints, media: Sequence[Media], processor: Processor, *, source: str = "") -> Ints:
    """Return the tokens with one placeholder per image and video: the second form of `Processor.encode`.

    Raises DataError as `last_image_tokens` does.
    """
    last = last_image_tokens(tokens, media, processor, source=source)
    return processor.collapsed(tokens, last, [item.size for item in media])
