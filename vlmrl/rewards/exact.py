"""Reward 1 if the final answer is the label, written the same way; numbers may be written differently."""

import re
from fractions import Fraction

from vlmrl.rewards.final_answer import final_answer
from vlmrl.rewards.labels import spellings

# At most three digits of exponent: model output must not make a number that fills the memory.
_DECIMAL = r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_RATIO = r"[+-]?[0-9]+/[0-9]+"
_MAX_NUMBER_CHARS = 400


def score(response: str, label: str) -> float:
    """1.0 or 0.0.

    Compares the label with the response's final answer (`final_answer`): its box, the content of
    `<answer>...</answer>`, or the whole response, stripped. `4`, `4.0`, `+4`, `8/2` and `4e0` are the same number, and
    so are `1,000` and `1000`; anything else is compared as text. For labels that are lists see `spellings`.
    """
    answer = final_answer(response).text
    return float(any(same(answer, spelling) for spelling in spellings(label)))


def unusable(label: str) -> str | None:
    """Why no response can match the label; None when one can."""
    return None if any(spellings(label)) else "it is empty"


def same(first: str, second: str) -> bool:
    """Equal as numbers if both are numbers, else equal as text. Empty texts are not equal."""
    numbers = number(first), number(second)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return first == second and first != ""


def number(text: str) -> Fraction | None:
    """Return the exact value of the text; None if it is not a number or has more than 400 characters."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    if re.fullmatch(_RATIO, text):
        above, below = text.split("/")
        return Fraction(int(above), int(below)) if int(below) else None
    if re.fullmatch(_DECIMAL, text):
        return Fraction(text.replace(",", ""))
    return None
