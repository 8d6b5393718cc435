"""Right and subtly wrong responses to the questions of `arithmetic`: the counterpart of `visual_preferences` without
images.

    vlmrl dpo --data.prompt_dataset 'text_preferences?difficulty=1+2&size=5000' ...

The columns are those of `visual_preferences`. A question is in the same split as in `arithmetic`.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlmrl.data.rows import Generated
from vlmrl.data.solutions import SEPARATOR, Solution, Wording, Wrong, pick_wrong, preference_columns
from vlmrl.datasets import arithmetic

_OPERATIONS = {"+": operator.add, "-": operator.sub, "×": operator.mul}
_OTHER = {"+": "-", "-": "+", "×": "+"}
_TEXT = re.compile(r"\(?(\d+) ([-+×]) (\d+)\)?(?: ([-+×]) (\d+))?")
_LARGEST = 10**9


@dataclass(frozen=True, slots=True)
class Expression:
    """`a symbol b`, or `(a symbol b) outer c`, and how somebody works it out."""

    a: int
    symbol: str
    b: int
    outer: str | None = None
    c: int = 0
    slip: int = 0
    """Added to the result of the first operation: a mistake of calculation."""

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Read an expression as `arithmetic` and `visual_math` write it."""
        match = _TEXT.fullmatch(text)
        assert match is not None, text
        a, symbol, b, outer, c = match.groups()
        return cls(int(a), symbol, int(b), outer, int(c or 0))

    @property
    def text(self) -> str:
        """The expression."""
        inner = f"{self.a} {self.symbol} {self.b}"
        return inner if self.outer is None else f"({inner}) {self.outer} {self.c}"

    def solve(self) -> Solution:
        """Work it out, one step per operation."""
        value = _OPERATIONS[self.symbol](self.a, self.b) + self.slip
        steps = [f"{self.a} {self.symbol} {self.b} = {value}"]
        if self.outer is not None:
            inner, value = value, _OPERATIONS[self.outer](value, self.c)
            steps.append(f"{inner} {self.outer} {self.c} = {value}")
        return Solution(tuple(steps), str(value), value)

    def misread(self) -> Iterator[Expression]:
        """Yield the expression with a digit off by one."""
        numbers = ("a", "b") if self.outer is None else ("a", "b", "c")
        for name in numbers:
            number: int = getattr(self, name)
            for change in (-1, 1, *((-10, 10) if number >= 10 else ())):
                if number + change > 0:
                    yield replace(self, **{name: number + change})

    def mistakes(self) -> Iterator[Wrong]:
        """Yield solutions with one mistake: a number or a sign is misread, or the result of a step is off."""
        for expression in self.misread():
            yield Wrong("misread number", expression.solve())
        yield Wrong("other operation", replace(self, symbol=_OTHER[self.symbol]).solve())
        for slip in (-10, -1, 1, 10):
            yield Wrong("off by one" if abs(slip) == 1 else "off by ten", replace(self, slip=slip).solve())
        if self.outer == "×" and self.symbol != "×":
            product = self.b * self.c
            value = _OPERATIONS[self.symbol](self.a, product)
            steps = f"{self.b} × {self.c} = {product}", f"{self.a} {self.symbol} {product} = {value}"
            yield Wrong("brackets left out", Solution(steps, str(value), value))


@dataclass(frozen=True, slots=True)
class _Preference:
    question: str
    key: str
    columns: dict[str, Any]
    difficulty: int

    def row(self) -> dict[str, Any]:
        return {"input": self.question, **self.columns, "family": "arithmetic", "difficulty": self.difficulty}


def rows(
    *,
    split: str,
    seed: int,
    size: int = 10_000,
    difficulty: tuple[int, ...] = (1,),
    kind: str = "pairs",
    worked: bool = False,
    boxed: bool = False,
    separator: str = SEPARATOR,
) -> Sequence[dict[str, Any]]:
    """Generate `size` rows; for the options see `visual_preferences`, for the difficulties `arithmetic`.

    Raises:
        ConfigError: an option is out of range.
    """
    wording = Wording(kind, worked or kind == "steps", boxed, separator)
    wording.check("text_preferences")
    invent_question = arithmetic.inventor("text_preferences", difficulty=difficulty, boxed=boxed)

    def invent(rng: random.Random, row: int) -> _Preference:
        while True:
            question = invent_question(rng, row)
            expression = Expression.parse(question.text)
            right = expression.solve()
            # A minus sign would give the wrong answer away.
            within = (0, _LARGEST) if right.size >= 0 else (-_LARGEST, -1)
            wrong = pick_wrong(rng, right, expression.mistakes(), within=within)
            if wrong is not None:
                columns = preference_columns(rng, right, wrong, wording)
                return _Preference(f"What is {question.text}?", question.key, columns, question.difficulty)

    return Generated(invent, size=size, split=split, seed=seed)
