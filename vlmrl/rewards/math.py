"""Reward 1 if the final answer is mathematically equal to the label, however it is written (math-verify)."""

import logging
import re
import threading
from functools import lru_cache
from itertools import product
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from vlmrl.rewards.exact import number, same
from vlmrl.rewards.failures import TooHardError
from vlmrl.rewards.final_answer import Final, final_answer
from vlmrl.rewards.labels import spellings
from vlmrl.rewards.spelling import (
    bracket_of,
    is_clock,
    is_words,
    needs_no_parser,
    option_of,
    plain,
    same_clock,
    same_words,
)
from vlmrl.rewards.units import agree, last_unit, measure

# The final answer is at the end, and no label is a formula of more characters than this. The bound keeps a huge output
# cheap: some of math-verify's regular expressions take quadratic time.
_MAX_FORMULA_CHARS = 1000
# math-verify stops itself by SIGALRM, which needs the main thread; the pool's own limit covers the rest.
_STEP_LIMIT_S = 2
_IN_MATH_MODE = ("\\boxed", "$", "\\(", "\\[")
_LETTER = re.compile(r"[A-Z]|\([A-Z]\)")
_SENTENCE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")

for _name in ("math_verify", "latex2sympy2_extended"):
    # They log the whole text, which is model output, whenever a final answer is too hard.
    logging.getLogger(_name).setLevel(logging.ERROR)


class _UnreadableError(Exception):
    """A label that math-verify cannot parse. An exception, so that `lru_cache` does not keep it."""


def score(response: str, label: str) -> float:
    """1.0 or 0.0.

    Compares the label with the response's final answer (`final_answer`); without box or tags, with the last formula
    near its end. `1/2`, `0.5` and `\\frac{1}{2}` are equal, and so are `x = 4` and `4`. Words, names such as `ab` and
    clock times are compared as such, ignoring case and leading zeros. An option may be written out: `B. 12 cm` for `B`.
    If both sides have a unit or a bracket around a list, these must agree: `12 m` is not `12 cm`, nor `\\{1, 2\\}`
    `(1, 2)`. For labels that are lists see `spellings`. A final answer that cannot be parsed or is too long scores 0.

    Raises TooHardError when it takes too long to parse or to compare.
    """
    final = final_answer(response)
    return float(bool(final.text) and any(_equals(final, wanted) for wanted in spellings(label)))


def unusable(label: str) -> str | None:
    """Why no response can match the label; None if one can. Raises TooHardError when it takes too long to parse."""
    reasons = [_unusable(wanted) for wanted in spellings(label)]
    return None if None in reasons else reasons[0]


def _equals(final: Final, wanted: str) -> bool:
    answer = final.text
    if same(answer, wanted):
        return True
    if len(answer) > _MAX_FORMULA_CHARS:
        if final.place != "whole":
            return False
        answer = answer[-_MAX_FORMULA_CHARS:]
    answer, wanted = plain(answer), plain(wanted)
    if final.place != "whole" and _LETTER.fullmatch(wanted) and option_of(answer) == wanted.strip("()"):
        return True
    value, unit = measure(answer)
    wanted_value, wanted_unit = measure(wanted)
    if unit is None and final.place != "box":
        unit = last_unit(answer)
    if not agree(unit, wanted_unit):
        return False
    if same(value, wanted_value):
        return True
    settled = _without_algebra(value, wanted_value)
    if settled is not None:
        return settled
    if final.place == "whole" or (final.place == "tags" and _SENTENCE.search(value)):
        return _equal_in_algebra(answer, wanted_value)
    return _equal_in_algebra(_formula(value), wanted_value)


def _without_algebra(value: str, wanted: str) -> bool | None:
    """Whether they are equal; None if only algebra can decide."""
    if is_words(wanted):
        return same_words(value.removeprefix("\\"), wanted)
    if is_clock(wanted):
        return same_clock(value, wanted)
    if _is_integer(value) and _is_integer(wanted):
        return False
    brackets = {bracket_of(value), bracket_of(wanted)}
    return False if brackets == {"(", "{"} else None


def _equal_in_algebra(text: str, wanted: str) -> bool:
    """Whether the last formula of the text equals the label. Raises TooHardError when that takes too long to decide."""
    limit = _step_limit()
    try:
        expected = _parse_label(wanted)
    except _UnreadableError:
        return False
    readings = _parse(text, limit)
    is_too_hard = False
    for expected_reading, reading in product(expected, readings):
        try:
            if verify(expected_reading, reading, timeout_seconds=limit, raise_on_error=True):
                return True
        except TimeoutException:
            is_too_hard = True
        except Exception:  # sympy may raise anything on model output; the other readings are still tried
            continue
    if is_too_hard:
        raise TooHardError(f"comparing took longer than {limit} s")
    return False


def _unusable(wanted: str) -> str | None:
    if not wanted:
        return "it is empty"
    if len(wanted) > _MAX_FORMULA_CHARS:
        return f"it is longer than {_MAX_FORMULA_CHARS} characters"
    if needs_no_parser(wanted):
        return None
    value = measure(plain(wanted)).value
    try:
        readings = _parse_label(value)
    except _UnreadableError:
        readings = []
    return "it cannot be parsed" if all(isinstance(reading, str) for reading in readings) else None


@lru_cache(maxsize=4096)
def _parse_label(wanted: str) -> list[Any]:
    readings = _parse(_formula(wanted), _step_limit())
    if not readings:
        raise _UnreadableError
    return readings


def _formula(text: str) -> str:
    return text if any(mark in text for mark in _IN_MATH_MODE) else f"\\boxed{{{text}}}"


def _parse(text: str, limit: int | None) -> list[Any]:
    """Return the possible readings of the text, none if it cannot be parsed. Raises TooHardError when that takes too
    long."""
    try:
        # `parsing_timeout` is declared as an int, but None is what turns it off.
        readings: list[Any] = parse(text, parsing_timeout=limit, raise_on_error=True)  # type: ignore[arg-type, unused-ignore]
    except TimeoutException as error:
        raise TooHardError(f"parsing took longer than {limit} s") from error
    except Exception:  # latex2sympy may raise anything on model output
        return []
    return readings


def _step_limit() -> int | None:
    return _STEP_LIMIT_S if threading.current_thread() is threading.main_thread() else None


def _is_integer(text: str) -> bool:
    value = number(text)
    return value is not None and value.denominator == 1
