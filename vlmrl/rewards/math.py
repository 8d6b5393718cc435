"""1 when the answer means the same as the label in mathematics, however it is written (math-verify)."""

import logging
import re
import threading
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from vlmrl.rewards.boxed import last_boxed
from vlmrl.rewards.exact import answer_of, number, same

WANTS_LABEL = True

# The answer stands at the end, and a formula of more characters than this is nobody's label. The bound is what keeps a
# huge output cheap: some of math-verify's regular expressions take quadratic time.
_LONGEST_FORMULA = 1000
# math-verify stops itself by SIGALRM, which needs the main thread; the pool's own limit covers the rest.
_STEP_LIMIT_S = 2
_IN_MATH_MODE = ("\\boxed", "$", "\\(", "\\[")
# Sympy would read a word as a product of letters, so that every anagram were right, and 3:30 as the fraction 3/30.
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")
_CLOCK = re.compile(r"[0-9]{1,4}(?::[0-9]{2})+")

for _name in ("math_verify", "latex2sympy2_extended"):
    # They warn with the whole text whenever an answer is too hard; that is model output, and scores 0.
    logging.getLogger(_name).setLevel(logging.ERROR)


def score(response: str, label: str) -> float:
    """1.0 or 0.0.

    What is compared is the last `\\boxed{...}` of the answer, else the last formula near its end. `1/2`, `0.5` and
    `\\frac{1}{2}` are equal, and so are `x = 4` and `4`. Words and clock times are compared as such, ignoring case and
    leading zeros. An answer that cannot be read, is too long or too hard to compare scores 0.
    """
    found, wanted = answer_of(response), answer_of(label)
    if same(found, wanted):
        return 1.0
    if _WORDS.fullmatch(wanted):
        return float(_plain(found).casefold() == wanted.casefold())
    if _CLOCK.fullmatch(wanted):
        return float(_clock(_plain(found)) == _clock(wanted))
    if _is_integer(found) and _is_integer(wanted):
        return 0.0
    if last_boxed(response) is not None:
        if len(found) > _LONGEST_FORMULA:
            return 0.0
        formula = f"\\boxed{{{found}}}"
    else:
        formula = response[-_LONGEST_FORMULA:]
    expected = _parse_label(label)
    limit = _step_limit()
    return float(bool(expected) and verify(expected, _parse(formula, limit), timeout_seconds=limit))


@lru_cache(maxsize=4096)
def _parse_label(label: str) -> list[Any]:
    in_math_mode = any(mark in label for mark in _IN_MATH_MODE)
    return _parse(label if in_math_mode else f"\\boxed{{{label}}}", _step_limit())


def _parse(text: str, limit: int | None) -> list[Any]:
    # `parsing_timeout` is declared as an int, but None is what turns it off.
    return parse(text, parsing_timeout=limit)  # type: ignore[arg-type, no-any-return, unused-ignore]


def _step_limit() -> int | None:
    return _STEP_LIMIT_S if threading.current_thread() is threading.main_thread() else None


def _is_integer(text: str) -> bool:
    value = number(text)
    return value is not None and value.denominator == 1


def _plain(text: str) -> str:
    """Without `\\text{...}` around it, dollar signs and a full stop at the end."""
    text = text.strip().strip("$").rstrip(".")
    wrapped = re.fullmatch(r"\\(?:text|textbf|mathrm)\{([^{}]*)\}", text)
    return (wrapped.group(1) if wrapped else text).strip()


def _clock(text: str) -> list[int] | None:
    return [int(part) for part in text.split(":")] if _CLOCK.fullmatch(text) else None
