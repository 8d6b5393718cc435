"""What the settings of every verb have: which there are, and the checks that cross sections."""

from collections.abc import Iterable
from typing import ClassVar, Literal, Self, get_origin

from pydantic import model_validator
from pydantic.fields import FieldInfo

from vlmrl.config.base import ConflictError, Section, Unread
from vlmrl.config.names import is_given, named_in, settings, value


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
        _refuse(self, conflicts=self.conflicts(), unread=unread)
        return self


def _refuse(config: Section, *, conflicts: Iterable[str], unread: Unread) -> None:
    """Raise all of it at once: contradictions, and settings that were given but would not be read.

    A value that means "off" (`eval.steps -1`) is what the run does anyway, and what the user has switched off by hand
    (`algo.kl.init_coef 0`) may keep its settings (`ref.num_gpus_per_node 8`): neither is a mistake.
    """
    dead = [
        f"{name} would not be read: {reason}"
        for name, reason in unread.items()
        if is_given(config, name) and not _is_off(config, name) and not _is_switched_off(config, reason)
    ]
    lines = [*conflicts, *dead]
    if lines:
        raise ConflictError(lines)


def _is_off(config: Section, name: str) -> bool:
    """Whether a setting says no to what it is about: false, none, 0, or -1 as a number of steps."""
    given, kind = value(config, name), settings(type(config))[name].annotation
    # The 0 of `ds.zero_stage` is a choice like its others.
    return given is None or (get_origin(kind) is not Literal and isinstance(given, int | float) and given in (0, -1))


def _is_switched_off(config: Section, reason: str) -> bool:
    """Whether the reason names a setting that the user has switched off, and not only left at its default."""
    return any(is_given(config, name) and _is_off(config, name) for name in named_in(reason, settings(type(config))))
