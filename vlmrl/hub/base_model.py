"""The model that a run began with: its Hub id and its licence, as far as files on this machine give them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vlmrl.hub.privacy import public_value
from vlmrl.plugins import looks_local

CARD = "README.md"
"""The file of a model card."""
TAG = "vlmrl"
"""The tag of all model cards of vlmrl."""
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_METADATA = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_LICENSE_KEYS = ("license", "license_name", "license_link")
_MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that a run began with."""

    name: str
    """As in the settings, without folders of this machine."""
    hub_id: str | None = None
    """Its id on the Hub; for the result of another run, the id of the model that that one began with."""
    license: dict[str, str] = field(default_factory=dict)
    """`license`, `license_name` and `license_link` of its card; {} where they are not known here."""


def read_base(name: str) -> BaseModel:
    """Describe a model by its card, if it has one: in its folder, or among the Hub's downloads."""
    public = str(public_value(name))
    folder = Path(name).expanduser()
    if folder.is_dir():
        metadata = read_metadata(folder / CARD)
        is_ours = TAG in _as_list(metadata.get("tags"))
        bases = [base for base in _as_list(metadata.get("base_model")) if is_hub_id(base)] if is_ours else []
        return BaseModel(public, bases[0] if bases else None, license_of(metadata))
    if not is_hub_id(name) or looks_local(name):
        return BaseModel(public)
    card = _downloaded_card(name)
    return BaseModel(public, name, license_of(read_metadata(card)) if card is not None else {})


def read_metadata(card: Path) -> dict[str, Any]:
    """Read the metadata of a model card; {} if there is no card, or none that can be read."""
    try:
        match = _METADATA.match(card.read_text(encoding="utf-8"))
        metadata = yaml.safe_load(match[1]) if match is not None else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # a card is no reason to fail
        return {}
    return metadata if isinstance(metadata, dict) else {}


def license_of(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the fields of a licence; {} without one."""
    fields = {name: metadata.get(name) for name in _LICENSE_KEYS}
    found = {
        name: value.strip()
        for name, value in fields.items()
        if isinstance(value, str) and value.isprintable() and 0 < len(value.strip()) <= _MAX_CHARS
    }
    return found if "license" in found else {}


def is_hub_id(name: object) -> bool:
    """Whether this has the form `owner/name`."""
    return isinstance(name, str) and _HUB_ID.fullmatch(name) is not None


def _downloaded_card(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, CARD)
    return Path(path) if isinstance(path, str) else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
