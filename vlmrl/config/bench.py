"""What a benchmark repeats."""

from typing import Annotated

from pydantic import Field

from vlmrl.config.base import PositiveInt, Section


class Repeats(Section):
    """Repetitions."""

    repeats: PositiveInt = 5
    """Measurements, after one that is thrown away."""


class Widths(Section):
    """Repetitions and the numbers of answers to compare."""

    n_samples_per_prompt: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (2, 16)
    """Answers per prompt; each number is measured by itself."""
    repeats: PositiveInt = 3
    """Measurements of each, after one that is thrown away."""
