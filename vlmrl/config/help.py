"""The help of a verb: each setting with its type, default and help text.

The help texts are the docstrings below the fields of the sections (`train.py`, `algo.py`, ...).
"""

import inspect
import shutil
import textwrap
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from vlmrl.config.flags_and_yaml import choices, without_none
from vlmrl.config.names import subsection
from vlmrl.config.verb_base import VerbConfig

_PLAIN = {str: "TEXT", int: "INT", float: "NUMBER"}


SWITCHES = {
    "--dry-run": "Check all that can be checked without starting or sending anything, print the plan, and stop.",
    "--quiet": "Print only warnings, errors and results: no panel, no line per step, no tables.",
}
"""Words of some verbs that are no settings."""


def help_text(kind: type[VerbConfig], *, switches: Collection[str] = ()) -> str:
    """Format the output of `vlmrl VERB --help`, of a verb that has these switches."""
    width = min(shutil.get_terminal_size().columns, 110)
    words = "".join(f" [{switch}]" for switch in switches)
    lines = [
        f"usage: vlmrl {kind.verb} [--config FILE.yaml ...] [--section.setting VALUE ...]{words}",
        "",
        inspect.cleandoc(kind.__doc__ or ""),
        "",
    ]
    lines += [
        "Settings come from YAML files, where later files override earlier ones, and from flags, which override files.",
        "",
    ]
    lines += [
        "  --config FILE.yaml",
        "      Settings by section, `section: {setting: value}`. May be given several times.",
    ]
    for switch in switches:
        lines += [f"  {switch}", f"      {SWITCHES[switch]}"]
    lines += ["  --help", "      This text."]
    for name, field in kind.model_fields.items():
        section = subsection(field)
        assert section is not None, "a verb's settings lie in sections"
        if shown := list(_settings(kind, f"{name}.", width)):
            lines += ["", f"{name}: {_one_line(section.__doc__)}", *shown]
    return "\n".join(lines)


def _settings(kind: type[VerbConfig], prefix: str, width: int) -> Iterator[str]:
    required_first = sorted(kind.settings().items(), key=lambda item: not item[1].is_required())
    for name, field in required_first:
        if not name.startswith(prefix):
            continue
        yield f"  --{name} {_format_type(field.annotation)}{_format_default(field)}"
        yield from textwrap.wrap(_one_line(field.description), width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "  (required)"
    default = default_of(field)
    return f" = {default}" if default else ""


def default_of(field: FieldInfo) -> str:
    """Return a setting's default as on the command line; empty if there is none, or if it is None."""
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return "'{" + ", ".join(f'"{key}": {weight}' for key, weight in value.items()) + "}'"
    if isinstance(value, str) and not value.isprintable():
        return f"$'{value.encode('unicode_escape').decode()}'"  # as a shell takes a line break
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format_type(kind: Any) -> str:
    kind = without_none(kind)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if len(choices(kind)) > 1:
        # `str | tuple[str, ...]` takes one word or several: show the longer form.
        return max((_format_type(choice) for choice in choices(kind)), key=len)
    if kind is bool:
        return "[true|false]"
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        parts = [_format_type(part) for part in get_args(kind) if part is not Ellipsis]
        return f"{parts[0]} ..." if Ellipsis in get_args(kind) else " ".join(parts)
    if get_origin(kind) is dict:
        return "JSON"
    return _PLAIN[kind]
