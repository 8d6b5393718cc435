"""The tokens of images, collapsed to one placeholder each, as vLLM takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmrl.errors import SyncError
from vlmrl.plugins import Processor
from vlmrl.types import Ints, Media


def collapse(tokens: Ints, media: Sequence[Media], processor: Processor) -> Ints:
    """Return the tokens with one placeholder for the tokens of each image: the second form of `Processor.encode`.

    Raises:
        SyncError: the image tokens are not those of these images.
    """
    positions = np.flatnonzero(processor.token_types(tokens))
    counts = [processor.num_tokens(item.size) for item in media]
    if sum(counts) != len(positions):
        raise SyncError(f"{len(positions)} image tokens where the {len(media)} images have {sum(counts)}")
    keep = np.ones(len(tokens), dtype=np.bool_)
    keep[positions] = False
    for first, count in zip(np.cumsum([0, *counts[:-1]]), counts, strict=False):
        run = positions[first : first + count]
        if run[-1] - run[0] != count - 1:
            raise SyncError(f"the {count} tokens of an image are not side by side at position {run[0]}")
        keep[run[0]] = True
    return tokens[keep]
