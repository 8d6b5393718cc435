"""Tell links to files of a model, which are as good as the files, from links to any other file, which stay here."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vlmrl.hub.safetensors_damage import damage
from vlmrl.plugins import ADAPTER_CONFIG

_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Name of a file in the Hub's cache: a git or SHA-256 hash of its content."""
_MODEL_KEYS = (("config.json", "model_type"), (ADAPTER_CONFIG, "peft_type"))


def leads_to_model(link: Path) -> bool:
    """Whether a link in a model's folder leads to the same file of a model.

    That is a whole safetensors file, a model's file in the Hub's cache (`models--owner--name/blobs/`), or the file of
    that name in the folder of a model. A name alone does not say so: `config.json` may be anybody's.
    """
    target = link.resolve()
    if not target.is_file():  # a folder, or nothing any more
        return False
    if link.suffix == ".safetensors":
        return damage(target) is None
    blobs = target.parent
    if blobs.name == "blobs" and blobs.parent.name.startswith("models--"):
        return _BLOB.fullmatch(target.name) is not None
    return target.name == link.name and any(_has_key(target.parent / name, key) for name, key in _MODEL_KEYS)


def _has_key(file: Path, key: str) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # there is none, or it is of another program
        return False
    return isinstance(content, dict) and key in content
