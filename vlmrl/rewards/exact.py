"""1 when the answer is the label, written the same way; numbers may be written differently."""

import re
from fractions import Fraction

from vlmrl.rewards.final import final_answer
from vlmrl.rewards.labels import spellings

# At most three digits of exponent: model output must not be able to ask for a number that fills the memory.
_DECIMAL = r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_RATIO = r"[+-]?[0-9]+/[0-9]+"
_LONGEST_NUMBER = 400


def score(response: str, label: str) -> float:
    """1.0 or 0.0.

    What is compared is the response's final answer (`final_answer`): its box, what stands in `<answer>...</answer>`, or
    all of it, without the white space around it. `4`, `4.0`, `+4`, `8/2` and `4e0` are one number, and so are `1,000`
    and `1000`; all else is compared as text. `spellings` says what a label that is a list asks for.
    """
    found = final_answer(response).text
    return float(any(same(found, wanted) for wanted in spellings(label)))


def unusable(label: str) -> str | None:
    """Why no response can match the label; None when one can."""
    return None if any(spellings(label)) else "it is empty"


def same(one: str, other: str) -> bool:
    """Equal as numbers when both are numbers, else equal as text. Nothing is not equal to nothing."""
    numbers = number(one), number(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return one == other and one != ""


def number(text: str) -> Fraction | None:
    """The number that the text is, exactly; None when it is not a number, or one too long to be anybody's answer."""
    if len(text) > _LONGEST_NUMBER:
        return None
    if re.fullmatch(_RATIO, text):
        above, below = text.split("/")
        return Fraction(int(above), int(below)) if int(below) else None
    if re.fullmatch(_DECIMAL, text):
        return Fraction(text.replace(",", ""))
    return None
