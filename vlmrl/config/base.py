"""Base class and field types of the sections of settings."""

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
        raise ValueError("must be a number of steps above 0, or -1 for never")
    return steps


StepInterval = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]
"""An interval in steps; -1: never."""


def is_function_spec(spec: str) -> bool:
    """Whether `spec` has the form `path/to/file.py:function`."""
    return all(spec.rpartition(".py:")[::2])


def check_name(name: str, known: Collection[str], kind: str) -> str:
    """Return `name` if it is one of `known` or specifies a function in the user's file.

    Raises:
        ValueError: it is neither.
    """
    if name in known or is_function_spec(name):
        return name
    raise ValueError(f"no {kind} is called {name!r}: there are {', '.join(known)}, and path/to/file.py:function")


class Section(BaseModel):
    """A section of settings: frozen, closed, and documented by its attribute docstrings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


Unread = dict[str, str]
"""Full name of a setting -> the reason why the run does not read it."""


class ConflictError(ValueError):
    """Contradictions between settings. Each line names the settings in full, such as `train.batch_size`."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines
