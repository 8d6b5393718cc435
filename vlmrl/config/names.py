"""The full names of settings, such as `actor.adam.lr`: list them, look them up, and correct misspelt ones."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic.fields import FieldInfo

from vlmrl.config.base import Section

_NAME = re.compile(r"[a-z_]\w*(?:\.[a-z_]\w*)+")
_MIN_LIKENESS = 0.7


def subsection(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field holds; None if it holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def settings(section: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Full name -> field of every setting, in the order of definition."""
    fields: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        inner = subsection(field)
        fields |= {prefix + name: field} if inner is None else settings(inner, f"{prefix}{name}.")
    return fields


def all_but(section: type[Section], name: str, *kept: str) -> frozenset[str]:
    """Full names of a section's settings except those kept: `all_but(Ckpt, "ckpt", "output_dir")`.

    A subsection is kept as a whole: `all_but(Ds, "ds", "lora")`.
    """
    unknown = set(kept) - section.model_fields.keys()
    assert not unknown, f"{name} has no {unknown}"
    return frozenset(full for full in settings(section, f"{name}.") if full.split(".")[1] not in kept)


def setting_value(config: Section, name: str) -> Any:
    """Return the value of a setting, by its full name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def is_given(config: Section, name: str) -> bool:
    """Whether the user gave the setting."""
    *sections, last = name.split(".")
    for part in sections:
        config = getattr(config, part)
    return last in config.model_fields_set


def settings_named_in(text: str, names: Iterable[str]) -> list[str]:
    """Return the settings that a message names."""
    known = set(names)
    return [name for name in dict.fromkeys(_NAME.findall(text)) if name in known]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably intended: similar as a whole, or in its last part if the section is wrong."""
    last = name.rsplit(".", 1)[-1]

    def likeness(other: str) -> float:
        whole = difflib.SequenceMatcher(None, name, other).ratio() if "." in name else 0.0
        end = other.rsplit(".", 1)[-1]
        tail = difflib.SequenceMatcher(None, last, end).ratio()
        if len(last) > 3 and end.startswith(last[:-1]):  # `model` for `model_name_or_path`
            tail = max(tail, 0.9)
        # A match of only the last part counts slightly less, so that the section breaks ties.
        return max(whole, 0.85 * tail + 0.1 * whole)

    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best) >= _MIN_LIKENESS else None
