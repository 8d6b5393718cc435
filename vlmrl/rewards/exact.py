"""1 when the answer is the label, written the same way; numbers may be written differently."""

import re
from fractions import Fraction

from vlmrl.rewards.boxed import last_boxed

WANTS_LABEL = True

# At most three digits of exponent: model output must not be able to ask for a number that fills the memory.
_DECIMAL = r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_RATIO = r"[+-]?[0-9]+/[0-9]+"
_LONGEST_NUMBER = 400


def score(response: str, label: str) -> float:
    """1.0 or 0.0.

    What is compared is the last `\\boxed{...}` of the answer, else the whole answer, without the white space around it.
    `4`, `4.0`, `+4`, `8/2` and `4e0` are one number, and so are `1,000` and `1000`; all else is compared as text.
    """
    return float(same(answer_of(response), answer_of(label)))


def answer_of(text: str) -> str:
    """The last box, else everything; trimmed."""
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


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
