"""Reads labels that hold more than one text, and says which labels no response can match."""

import json
import re

from vlmrl.rewards.final import final_answer

_WORD = re.compile(r"(?<!\\)[^\W\d_]{2,}")


def spellings(label: str) -> list[str]:
    """The texts that a response is compared with: one that equals any of them is right.

    A label that is a JSON list of one is its element. Of several elements with words among them, such as
    `["4", "four"]`, any is right. Of others, such as `[1, 2]` or `["A", "B"]`, all are wanted, with or without the
    brackets. Any other label is its box, the inside of its answer tags, or itself.
    """
    parts = _parts(label)
    if parts is None:
        return [final_answer(label).text]
    if len(parts) == 1 or any(_WORD.search(part) for part in parts):
        return parts
    together = ", ".join(parts)
    return [together, f"[{together}]"]


def _parts(label: str) -> list[str] | None:
    """The elements of a JSON list of texts and numbers, as they are written; None for any other label."""
    if not label.strip().startswith("["):
        return None
    try:
        listed = json.loads(label, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    if not listed or not all(isinstance(part, str) for part in listed):
        return None
    return [final_answer(part).text for part in listed]
