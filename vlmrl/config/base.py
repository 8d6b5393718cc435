"""What every section of settings is: frozen, closed, documented by its own attribute docstrings."""

from collections.abc import Collection
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Text = Annotated[str, Field(min_length=1)]


def _not_zero(steps: int) -> int:
    if steps == 0:
        raise ValueError("wants a number of steps above 0, or -1 for never")
    return steps


Every = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]
"""A number of steps after which something happens again; -1: never."""


def names_function(spec: str) -> bool:
    """Whether a text has the form `path/to/file.py:function`, a function in the user's own file."""
    return all(spec.rpartition(".py:")[::2])


def known_or_own(name: str, known: Collection[str], what: str) -> str:
    """`name`, when it is one of `known` or names a function of the user's.

    Raises:
        ValueError: it is neither.
    """
    if name in known or names_function(name):
        return name
    raise ValueError(f"no {what} is called {name!r}: there are {', '.join(known)}, and path/to/file.py:function")


class Section(BaseModel):
    """One section of settings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


Unread = dict[str, str]
"""Full name of a setting -> why the run does not read it."""


class ConflictError(ValueError):
    """Settings at odds with each other. Every line names each of them in full, `train.batch_size`."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines
