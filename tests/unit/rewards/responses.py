"""Groups of responses for tests of rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vlmrl.types import ChatMessage, Episode, Group, Media, Pixels, Prompt, Rollout


class Picture:
    """A 5x4 image whose pixels are all (1, 2, 3)."""

    hash = "c0ffee"
    size = (5, 4)

    def fetch(self) -> Pixels:
        return np.tile(np.array([1, 2, 3], np.uint8), (4, 5, 1))


class LaterPicture(Picture):
    """A 2x3 image of feedback, whose pixels are all (7, 7, 7)."""

    hash = "bead"
    size = (2, 3)

    def fetch(self) -> Pixels:
        return np.full((3, 2, 3), 7, np.uint8)


def group(
    *texts: str, label: str | None = "7", media: tuple[Media, ...] = (), index: int = 3, prompt: str = "how many?"
) -> Group:
    """A prompt, `shapes:17`, and these responses."""
    none = np.zeros(1, np.int64)
    with_prompt = Prompt(index, "shapes:17", prompt, none, none, label, media, {"family": "x"})
    return Group(with_prompt, tuple(_rollout(text) for text in texts))


def conversations(first: Media | None = None, later: Media | None = None) -> Group:
    """A prompt of two messages, `shapes:17`, with a picture, and two conversations: one of two responses, with another
    picture as feedback, and one of a single response."""
    first, later = first or Picture(), later or LaterPicture()
    asked = group("7", "eight", media=(first,), prompt="<sys>be brief<user><pic>how many?<bot>")
    prompt_messages = (ChatMessage("system", ("be brief",)), ChatMessage("user", (first, "how many?")))
    last = ChatMessage("assistant", ("7",), reward=1.0)
    two = (ChatMessage("assistant", ("6",), reward=0.0), ChatMessage("user", ("no: ", later, "again")), last)
    one = (ChatMessage("assistant", ("eight",), reward=0.0),)
    text = asked.prompt.text
    episodes = [
        Episode("done", two, text + "6<end><user>no: <pic>again<bot>7"),
        Episode("turns", one, text + "eight"),
    ]
    rollouts = [replace(rollout, episode=e) for rollout, e in zip(asked.rollouts, episodes, strict=True)]
    return Group(replace(asked.prompt, messages=prompt_messages), tuple(rollouts))


def _rollout(text: str) -> Rollout:
    return Rollout.of_response(
        tokens=np.zeros(1, np.int64),
        sampled=np.ones(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        text=text,
        finish_reason="stop",
        version=0,
    )
