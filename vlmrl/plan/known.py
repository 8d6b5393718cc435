"""The model of a plan as a local folder: its own, or one that is written from a configuration."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.plan.shapes import SHAPES, published_name

_FAMILIES = get_args(tiny.Family)
_SAME_INPUTS = {"qwen3_moe": "qwen3", "qwen3_vl_moe": "qwen3_vl"}
"""Model type -> the family whose tokenizer and processor it shares."""
_KEPT = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def model_folder(name: str, scratch: Path) -> str:
    """Return a path that the memory plan reads: a folder with weights or without, or a Hub id.

    Of a known name, and of a config.json alone, a folder is written to `scratch`: the configuration, with the tokenizer
    and processor of a tiny model. Any other name is taken for a Hub id.

    Raises ConfigError for an unknown name without an owner, and when a configuration is of a family without a tiny
    model.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _from_file(path, scratch)
    if path.is_dir():
        is_alone = (path / "config.json").is_file() and not any(path.glob("*token*"))
        return _from_file(path / "config.json", scratch) if is_alone else name
    known = published_name(name)
    if known is None and "/" not in name:
        near = get_close_matches(name, SHAPES, n=1, cutoff=0.0)
        raise ConfigError(
            f"actor.model_name_or_path: no model {name} is known here (the nearest is {near[0]}): give a local folder, "
            "a config.json, or a Hub id with its owner"
        )
    if known is None:
        return name
    shape = SHAPES[known]
    folder = _tiny(shape.family, scratch, known)
    return _write(shape.config(_read(folder / "config.json")), folder)


def _from_file(file: Path, scratch: Path) -> str:
    config = _read(file)
    family = config.get("model_type", "")
    family = _SAME_INPUTS.get(family, family)
    if family not in _FAMILIES:
        raise ConfigError(
            f"actor.model_name_or_path: {file} has the model type {family}; without a tokenizer beside it a plan needs "
            f"one of {', '.join(_FAMILIES)}: give a complete folder, or a Hub id"
        )
    folder = _tiny(family, scratch, file.absolute().parent.name or "model")
    ids = {name: value for name, value in _read(folder / "config.json").items() if name in _KEPT}
    return _write(config | ids, folder)


def _tiny(family: tiny.Family, scratch: Path, name: str) -> Path:
    folder = scratch / name
    if not folder.exists():
        tiny.build(family, folder, size="micro")
        for weights in folder.glob("*.safetensors*"):
            weights.unlink()
    return folder


def _read(file: Path) -> dict[str, Any]:
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor.model_name_or_path: {file} cannot be read as JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ConfigError(f"actor.model_name_or_path: {file} is no configuration of a model")
    return contents


def _write(config: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return str(folder)
