"""Base class of the settings of a verb: their full names, and the checks that cross sections."""

from collections.abc import Iterable
from typing import ClassVar, Literal, Self, get_origin

from pydantic import model_validator
from pydantic.fields import FieldInfo

from vlmrl.config.base import ConflictError, Section, Unread
from vlmrl.config.names import is_given, setting_value, settings, settings_named_in


class VerbConfig(Section):
    """The settings of one verb."""

    verb: ClassVar[str]
    """The verb on the command line."""
    omits: ClassVar[frozenset[str]] = frozenset()
    """Full names of the settings in its sections that this verb does not have."""

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        """Full name -> field of every setting that the verb has."""
        return {name: field for name, field in settings(cls).items() if name not in cls.omits}

    @classmethod
    def sections(cls) -> list[str]:
        """Full names of the sections that hold them."""
        return sorted(
            {name.rsplit(".", depth)[0] for name in cls.settings() for depth in range(1, name.count(".") + 1)}
        )

    def unread(self) -> Unread:
        """Settings that have no effect because of others: full name -> reason."""
        return {}

    def conflicts(self) -> list[str]:
        """Contradictions between settings, one line each."""
        return []

    def resolve(self) -> None:
        """Set defaults that depend on several sections, before the checks. Only for the validator below."""

    @model_validator(mode="after")
    def check_sections_together(self) -> Self:
        self.resolve()
        unread = dict.fromkeys(self.omits, f"vlmrl {self.verb} does not have it") | self.unread()
        _refuse(self, conflicts=self.conflicts(), unread=unread)
        return self


def _refuse(config: Section, *, conflicts: Iterable[str], unread: Unread) -> None:
    """Raise one error for all contradictions and all given settings that would not be read.

    Two cases are no mistake: a value that means "off" (`eval.steps -1`), and the settings (`ref.num_gpus_per_node 8`)
    of something that the user has switched off explicitly (`algo.kl.init_coef 0`).
    """
    unused = [
        f"{name} would not be read: {reason}"
        for name, reason in unread.items()
        if is_given(config, name) and not _is_off(config, name) and not _is_switched_off(config, reason)
    ]
    lines = [*conflicts, *unused]
    if lines:
        raise ConflictError(lines)


def _is_off(config: Section, name: str) -> bool:
    """Whether a setting's value switches its feature off: false, none, 0, or -1 as a number of steps."""
    given, kind = setting_value(config, name), settings(type(config))[name].annotation
    # A 0 among named choices, as in `ds.zero_stage`, does not mean off.
    return given is None or (get_origin(kind) is not Literal and isinstance(given, int | float) and given in (0, -1))


def _is_switched_off(config: Section, reason: str) -> bool:
    """Whether the reason names a setting that the user has switched off explicitly."""
    return any(
        is_given(config, name) and _is_off(config, name) for name in settings_named_in(reason, settings(type(config)))
    )
