"""The final answer of a text: the content of its box or of its `<answer>` tags."""

from typing import Literal, NamedTuple

from vlmrl.rewards.boxed import last_boxed
from vlmrl.rewards.characters import same_characters

OPEN, CLOSE = "<answer>", "</answer>"


class Final(NamedTuple):
    """The part of a text that is its final answer."""

    text: str
    """Stripped and normalized (`same_characters`)."""
    place: Literal["box", "tags", "whole"]
    """Its origin; `whole`: without box or tags the whole text is the final answer."""


def final_answer(text: str) -> Final:
    """Return the last `<answer>...</answer>`, or the last box in it; without tags the last `\\boxed{...}`; else the
    text.

    Examples: `<think>\\boxed{3}</think><answer>4</answer>` -> 4, `<answer>it is \\boxed{5}</answer>` -> 5.
    Tags that are never closed, as in a truncated response, do not count.
    """
    tagged = last_tagged(text)
    boxed = last_boxed(text if tagged is None else tagged)
    if boxed is not None:
        return Final(same_characters(boxed), "box")
    return Final(same_characters(text).strip(), "whole") if tagged is None else Final(same_characters(tagged), "tags")


def last_tagged(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`, stripped; None without one."""
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, end) if end >= 0 else -1
    return text[start + len(OPEN) : end].strip() if start >= 0 else None
