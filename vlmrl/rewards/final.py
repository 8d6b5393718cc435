"""Finds the final answer of a text: what stands in its box, or between its answer tags."""

from typing import Literal, NamedTuple

from vlmrl.rewards.boxed import last_boxed
from vlmrl.rewards.characters import same_characters

OPEN, CLOSE = "<answer>", "</answer>"


class Final(NamedTuple):
    """The part of a text that counts as its answer."""

    text: str
    """Trimmed, characters that mean the same as one (`same_characters`)."""
    place: Literal["box", "tags", "whole"]
    """Where it stands; `whole`: nothing marks it, and it is the text itself."""


def final_answer(text: str) -> Final:
    """The last `<answer>...</answer>`, or the last box in it; without tags the last `\\boxed{...}`; else everything.

    Examples: `<think>\\boxed{3}</think><answer>4</answer>` -> 4, `<answer>it is \\boxed{5}</answer>` -> 5.
    Tags that are never closed, as in a truncated response, are none.
    """
    tagged = last_tagged(text)
    boxed = last_boxed(text if tagged is None else tagged)
    if boxed is not None:
        return Final(same_characters(boxed), "box")
    return Final(same_characters(text).strip(), "whole") if tagged is None else Final(same_characters(tagged), "tags")


def last_tagged(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`, trimmed; None without one."""
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, end) if end >= 0 else -1
    return text[start + len(OPEN) : end].strip() if start >= 0 else None
