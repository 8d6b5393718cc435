"""The full names of settings, `actor.adam.lr`: which there are, which were given, which a misspelt one means."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic.fields import FieldInfo

from vlmrl.config.base import Section

_NAME = re.compile(r"[a-z_]\w*(?:\.[a-z_]\w*)+")
_CLOSE_ENOUGH = 0.7


def subsection(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, or None when it holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def settings(section: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Full name -> field of everything that holds a value, in the order of the definitions."""
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        inner = subsection(field)
        found |= {prefix + name: field} if inner is None else settings(inner, f"{prefix}{name}.")
    return found


def all_but(section: type[Section], name: str, *kept: str) -> frozenset[str]:
    """Full names of a section's settings without some of them: `all_but(Ckpt, "ckpt", "output_dir")`.

    A section within it is kept as a whole: `all_but(Ds, "ds", "lora")`.
    """
    unknown = set(kept) - section.model_fields.keys()
    assert not unknown, f"{name} has no {unknown}"
    return frozenset(full for full in settings(section, f"{name}.") if full.split(".")[1] not in kept)


def value(config: Section, name: str) -> Any:
    """What a setting holds."""
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


def is_given(config: Section, name: str) -> bool:
    """The user set it: it does not merely have its default."""
    *sections, last = name.split(".")
    for part in sections:
        config = getattr(config, part)
    return last in config.model_fields_set


def named_in(text: str, names: Iterable[str]) -> list[str]:
    """The settings that a message speaks of."""
    known = set(names)
    return [name for name in dict.fromkeys(_NAME.findall(text)) if name in known]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant: alike as a whole, or in its last part when the section is wrong or missing."""
    last = name.rsplit(".", 1)[-1]

    def likeness(other: str) -> float:
        whole = difflib.SequenceMatcher(None, name, other).ratio() if "." in name else 0.0
        end = other.rsplit(".", 1)[-1]
        tail = difflib.SequenceMatcher(None, last, end).ratio()
        if len(last) > 3 and end.startswith(last[:-1]):  # `model` for `model_name_or_path`
            tail = max(tail, 0.9)
        # The last part alone is worth a little less, so that of two equal tails the one in the same section wins.
        return max(whole, 0.85 * tail + 0.1 * whole)

    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best) >= _CLOSE_ENOUGH else None
