"""Normalization of spellings (`$4$`, `\\text{red}`, `3√2`, `pi`), and tests for words, options and clock times."""

import re

from vlmrl.rewards.characters import same_characters
from vlmrl.rewards.exact import number
from vlmrl.rewards.final_answer import final_answer
from vlmrl.rewards.units import measure

_MATH_MODE = tuple((re.escape(a), re.escape(b)) for a, b in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")))
_WRAPPED = re.compile(
    "|".join(rf"{opened}([^$]+?){closed}" for opened, closed in _MATH_MODE)
    + r"|\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}"
)
_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "≤": "\\leq ", "≥": "\\geq ", "≠": "\\neq "}
    | {"∞": "\\infty ", "π": "\\pi ", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}"}
    | {"∪": "\\cup ", "∩": "\\cap ", "\u00a0": " ", "\u202f": " "}
)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9.]+|[A-Za-z]))")
_POWERS = re.compile(r"(?<=[A-Za-z0-9)}])[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_CONSTANTS = {"infinity": "\\infty", "inf": "\\infty", "infty": "\\infty"} | {
    name: f"\\{name}"
    for name in ("pi", "alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "sigma", "phi", "omega")
}
# Sympy would read a word as a product of letters, so that any anagram would be correct, x1 as x times 1, and 3:30 as
# the fraction 3/30.
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'’-]+[^\W\d_]+)*")
_IDENTIFIER = re.compile(r"(?!(?:sqrt|frac|sin|cos|tan|log|ln|exp|pi)[0-9])[A-Za-z]+[0-9][A-Za-z0-9]*")
_LATEX = re.compile(r"[\\^{}]")
_SHORT = 200
_CLOCK = re.compile(r"[0-9]{1,4}(?::[0-9]{2})+")
_OPTION = re.compile(r"(?:\(([A-Z])\)|([A-Z])\)|([A-Z])[.:])\s*(?=\S)")
_BETWEEN_LETTERS = re.compile(r"\s|\\cdot|\\times|\\[,;:! ]|[*~{}]")


def plain(text: str) -> str:
    """Return the text in LaTeX, without math mode or `\\text{...}` around it and without a full stop at its end.

    Examples: `$\\text{red}$.` -> `red`, `3√2` -> `3\\sqrt{2}`, `x²` -> `x^{2}`, `pi` -> `\\pi`.
    """
    text = text.strip()
    while True:
        bare = text[:-1].rstrip() if text.endswith(".") and not text.endswith("\\.") else text
        wrapped = _WRAPPED.fullmatch(bare)
        bare = bare if wrapped is None else next(group for group in wrapped.groups() if group is not None).strip()
        if bare == text or not bare:
            break
        text = bare
    if not text.isascii():
        # A second time: a long text has been cut to its end since `final_answer`.
        text = same_characters(text)
        text = _ROOT.sub(lambda root: f"\\sqrt{{{root.group(1) or root.group(2) or root.group(3)}}}", text)
        text = _POWERS.sub(lambda power: f"^{{{power.group().translate(_DIGITS)}}}", text)
        text = text.translate(_CHARACTERS).strip()
    return _CONSTANTS.get(text, text)


def option_of(text: str) -> str | None:
    """Return the letter of an option that is written out: `B` of `B. 12 cm` and `(B) 12 cm`. None otherwise, also for
    two."""
    option = _OPTION.match(text)
    if option is None or _OPTION.search(text, option.end()) or re.fullmatch("[A-Z]", text[option.end() :]):
        return None
    return next(letter for letter in option.groups() if letter)


def is_words(text: str) -> bool:
    """The text is words or a name such as `ab`, `H2O` and `x1`; a single letter is neither."""
    return (_WORDS.fullmatch(text) or _IDENTIFIER.fullmatch(text)) is not None and number(text) is None


def same_words(first: str, second: str) -> bool:
    """Equal except for case, white space, and product signs between the letters of one word."""
    first, second = (" ".join(text.casefold().split()) for text in (first, second))
    return first == second or (" " not in second and _BETWEEN_LETTERS.sub("", first) == second)


def is_clock(text: str) -> bool:
    """The text is a clock time such as `3:30` and `03:30:00`."""
    return _CLOCK.fullmatch(text) is not None


def same_clock(first: str, second: str) -> bool:
    """Equal except for leading zeros."""
    return is_clock(first) and list(map(int, first.split(":"))) == list(map(int, second.split(":")))


def needs_no_parser(label: str) -> bool:
    """A response can match the label whether or not it can be parsed: it is a number, words or a clock time, with or
    without a unit, or a short text without a formula, which is at least compared as text."""
    if not _LATEX.search(label):
        return len(label) <= _SHORT
    value = measure(plain(final_answer(label).text)).value
    return number(value) is not None or is_words(value) or is_clock(value)


def bracket_of(text: str) -> str | None:
    """Return the bracket around a list, `(` or `{`; None without brackets, with other brackets, and if it is not a
    list.

    Example: `\\left\\{1, 2\\right\\}` -> `{`; `(1, 2) \\cup (3, 4)`, `(4)` and `1, 2` -> None.
    """
    text = re.sub(r"\\(?:left|right)|\s", "", text)
    for opened, closed, kind in (("\\{", "\\}", "{"), ("(", ")", "(")):
        inside = text[len(opened) : -len(closed)]
        if text.startswith(opened) and text.endswith(closed) and _is_balanced(inside) and "," in inside:
            return kind
    return None


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return False
    return depth == 0
