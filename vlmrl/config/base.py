"""What every section of settings is: frozen, closed, documented by its own attribute docstrings."""

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


class Section(BaseModel):
    """One section of settings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class ConflictError(ValueError):
    """Settings at odds with each other. Every line names each of them in full, `train.batch_size`."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines
