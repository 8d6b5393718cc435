"""The base of sequences whose rows are made when they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, overload


class RowSequence(Sequence[dict[str, Any]]):
    """Rows by index, and lists of rows by slice. Subclasses define `_row` and `__len__`."""

    __slots__ = ()

    @abstractmethod
    def _row(self, index: int) -> dict[str, Any]:
        """Make the row `index`, from -len to len - 1. Raises IndexError outside of that."""

    def question_key(self, index: int) -> str | None:
        """Return the identity of a generated row's question, without drawing its picture; None for other rows."""
        del index
        return None

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(len(self)))]
        return self._row(index)
