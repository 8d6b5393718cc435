"""Image tokens of a sequence: one per merged patch, as the model reads them, or one per image, as vLLM takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmrl.errors import DataError
from vlmrl.plugins import Processor
from vlmrl.types import Ints, Media


def last_image_tokens(tokens: Ints, media: Sequence[Media], processor: Processor, *, source: str = "") -> Ints:
    """Return the position of the last token of each image. `source` names the sequence, for messages.

    Raises:
        DataError: the image tokens are not those of these images.
    """
    places = np.flatnonzero(processor.token_types(tokens))
    counts = np.array([processor.num_tokens(item.size) for item in media], dtype=np.int64)
    ends = counts.cumsum()
    if len(places) != counts.sum():
        raise DataError(
            f"{source or 'a sample'} has {len(places)} image tokens, but its {len(media)} images take {counts.sum()}: "
            "the model would see none of them, or wrong ones"
        )
    last: Ints = places[ends - 1]
    apart = np.flatnonzero(last - places[ends - counts] != counts - 1)
    if len(apart):
        raise DataError(
            f"{source or 'a sample'}: the tokens of its image {apart[0] + 1} are not side by side: the model would see "
            "it in parts"
        )
    return last


def collapse(tokens: Ints, media: Sequence[Media], processor: Processor, *, source: str = "") -> Ints:
    """Return the tokens with one placeholder per image: the second form of `Processor.encode`.

    Raises DataError as `last_image_tokens` does.
    """
    kept = processor.token_types(tokens) == 0
    kept[last_image_tokens(tokens, media, processor, source=source)] = True
    collapsed: Ints = tokens[kept]
    return collapsed
