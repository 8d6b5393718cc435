"""Image tokens of a sequence: one per merged patch, as the model reads them, or one per image, as vLLM takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmrl.errors import DataError
from vlmrl.plugins import Processor
from vlmrl.types import Ints, Media


def last_image_tokens(tokens: Ints, media: Sequence[Media], processor: Processor, *, source: str) -> Ints:
    """Return the position of the last token of each image.

    Raises:
        DataError: the sequence has other image tokens than its images take; `source` names it.
    """
    is_image = processor.token_types(tokens) > 0
    ends = np.cumsum([processor.num_tokens(item.size) for item in media], dtype=np.int64)
    num_needed = int(ends[-1]) if len(ends) else 0
    if is_image.sum() != num_needed:
        raise DataError(
            f"{source or 'a sample'} has {is_image.sum()} image tokens, but its {len(media)} images take "
            f"{num_needed}: the model would see none of them, or wrong ones"
        )
    last: Ints = np.flatnonzero(is_image)[ends - 1]
    return last


def collapse(tokens: Ints, media: Sequence[Media], processor: Processor, *, source: str = "") -> Ints:
    """Return the tokens with one placeholder per image. Raises DataError as `last_image_tokens` does."""
    if not media:
        return tokens
    kept = processor.token_types(tokens) == 0
    kept[last_image_tokens(tokens, media, processor, source=source)] = True
    collapsed: Ints = tokens[kept]
    return collapsed
