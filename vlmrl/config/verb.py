"""What the settings of every verb have: which there are, and the checks that cross sections."""

from typing import ClassVar, Self

from pydantic import model_validator
from pydantic.fields import FieldInfo

from vlmrl.config import checks
from vlmrl.config.base import Section, Unread
from vlmrl.config.names import settings


class Run(Section):
    """What every verb's settings have."""

    verb: ClassVar[str]
    """How the command line calls it."""
    omits: ClassVar[frozenset[str]] = frozenset()
    """Full names of what its sections hold for other verbs: to this verb they do not exist."""

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        """Full name -> field of every setting that the verb has."""
        return {name: field for name, field in settings(cls).items() if name not in cls.omits}

    @classmethod
    def sections(cls) -> list[str]:
        """Full names of the sections that hold them."""
        found = {name.rsplit(".", depth)[0] for name in cls.settings() for depth in range(1, name.count(".") + 1)}
        return sorted(found)

    def unread(self) -> Unread:
        """Settings that this run does not read, because of what others say: full name -> reason."""
        return {}

    def conflicts(self) -> list[str]:
        """Settings that contradict each other, one line for each contradiction."""
        return []

    @model_validator(mode="after")
    def check_sections_together(self) -> Self:
        unread = dict.fromkeys(self.omits, f"vlmrl {self.verb} does not have it") | self.unread()
        checks.refuse(self, conflicts=self.conflicts(), unread=unread)
        return self
