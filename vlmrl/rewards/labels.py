"""Labels that hold more than one text, and the spellings of a final answer that match them."""

import json
import re

from vlmrl.rewards.final_answer import final_answer

_WORD = re.compile(r"(?<!\\)[^\W\d_]{2,}")


def spellings(label: str) -> list[str]:
    """Return the texts that are compared with a final answer, which is correct if it equals any of them.

    A JSON list of one element stands for the element. With several elements and words among them, such as
    `["4", "four"]`, any element is correct. With other elements, such as `[1, 2]` or `["A", "B"]`, the final answer
    must have all of them, with or without the brackets. Any other label is its box, the content of its `<answer>` tags,
    or itself.
    """
    parts = _parts(label)
    if parts is None:
        return [final_answer(label).text]
    if len(parts) == 1 or any(_WORD.search(part) for part in parts):
        return parts
    together = ", ".join(parts)
    return [together, f"[{together}]"]


def _parts(label: str) -> list[str] | None:
    """Return the elements of a JSON list of texts and numbers, as they are written; None for any other label."""
    if not label.strip().startswith("["):
        return None
    try:
        listed = json.loads(label, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    if not listed or not all(isinstance(part, str) for part in listed):
        return None
    return [final_answer(part).text for part in listed]
