"""Groups of responses for tests of rewards."""

from __future__ import annotations

import numpy as np

from vlmrl.types import Group, Media, Pixels, Prompt, Rollout


class Picture:
    """A 5x4 image whose pixels are all (1, 2, 3)."""

    hash = "c0ffee"
    size = (5, 4)

    def fetch(self) -> Pixels:
        return np.tile(np.array([1, 2, 3], np.uint8), (4, 5, 1))


def group(
    *texts: str, label: str | None = "7", media: tuple[Media, ...] = (), index: int = 3, prompt: str = "how many?"
) -> Group:
    """A prompt, `shapes:17`, and these responses."""
    none = np.zeros(1, np.int64)
    with_prompt = Prompt(index, "shapes:17", prompt, none, none, label, media, {"family": "x"})
    return Group(with_prompt, tuple(_rollout(text) for text in texts))


def _rollout(text: str) -> Rollout:
    return Rollout.of_response(
        tokens=np.zeros(1, np.int64),
        sampled=np.ones(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        text=text,
        finish_reason="stop",
        version=0,
    )
