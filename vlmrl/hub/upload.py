"""The files of a model that go to the Hub, checked to be complete and free of paths of this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from vlmrl.errors import ConfigError
from vlmrl.hub.base_model import CARD, is_hub_id
from vlmrl.hub.links import leads_to_model
from vlmrl.hub.model_card import LICENCE_UNKNOWN, THIS_FOLDER, licence_line
from vlmrl.hub.privacy import without_secrets
from vlmrl.hub.safetensors_damage import damage
from vlmrl.plugins import ADAPTER_CONFIG, ONLY_SAFETENSORS

_MODEL_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WEIGHTS, _ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"
_OF_A_MODEL = (
    *("*.safetensors", "*.safetensors.index.json", "*.jinja", "additional_chat_templates/*.jinja", "*.py"),
    *("*config.json", "chat_template.json", "tokenizer*.json", "vocab*.json"),
    *("special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "merges.txt", "tekken.json", "*.model", "*.tiktoken", "README.md", "*.png"),
)
"""Names of files that belong to a model; all others stay here."""
_NAMES_OF_MODELS = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys of JSON files that may hold a path of this machine."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What a push uploads."""

    files: dict[str, Path | bytes]
    """Path in the repository -> the file here, or its content where that differs."""
    left_out: tuple[str, ...]
    """Files of the folder that are not uploaded."""

    def sizes(self) -> dict[str, int]:
        """Path in the repository -> bytes."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }

    @property
    def weights(self) -> set[str]:
        """Files of weights, and their index."""
        return set(filter(is_weights, self.files))


def is_weights(name: str) -> bool:
    """Whether a file of a repository is of the kind that loaders take weights from: an old one must not stay."""
    return name in (_INDEX, _ADAPTER_WEIGHTS) or (
        name.startswith("model") and name.endswith(".safetensors") and "/" not in name
    )


def plan_upload(folder: Path, *, repo: str, base: str | None, licence: dict[str, str]) -> Upload:
    """Return the files of a model's folder that are uploaded to `repo`.

    Args:
        base: Hub id of the base; None: as the card says.
        licence: fields of the base's licence, where the card has none.

    Raises ConfigError when the model is incomplete, its configuration is a link to a file that is not of a model, or an
    adapter's base has no name on the Hub.
    """
    check_complete(folder)
    card = _card(folder, repo=repo, base=base, licence=licence)
    base_model = None if card is None else card.data.get("base_model")
    base = base or (base_model if is_hub_id(base_model) else None)
    files: dict[str, Path | bytes] = {}
    left_out = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if not _belongs(name) or _leads_elsewhere(path):
            if name in (_MODEL_CONFIG, ADAPTER_CONFIG):
                raise ConfigError(
                    f"push.run: {path} is a link to {path.resolve()}, which is no file of a model: put the file itself "
                    "in its place"
                )
            left_out.append(name)
        elif path.suffix == ".json":
            files[name] = _public_json(path, base)
        else:
            files[name] = path
    if card is not None:
        files[CARD] = without_secrets(str(card)).encode()
    return Upload(files, tuple(left_out))


def _belongs(name: str) -> bool:
    """Whether a file of the folder, by its path in it, belongs to a model."""
    depth = name.count("/")
    return any(depth == pattern.count("/") and fnmatchcase(name, pattern) for pattern in _OF_A_MODEL)


def _leads_elsewhere(path: Path) -> bool:
    """Whether a file is a link to a file that is not of a model."""
    return path.is_symlink() and not leads_to_model(path)


def check_complete(folder: Path) -> None:
    """Raise ConfigError unless the folder holds a whole model or adapter, with whole files of weights."""
    if (folder / ADAPTER_CONFIG).is_file():
        weights = [_ADAPTER_WEIGHTS]
    elif (folder / _MODEL_CONFIG).is_file():
        weights = _shards(folder)
    else:
        raise ConfigError(f"push.run: {folder} holds no model: it has neither {_MODEL_CONFIG} nor {ADAPTER_CONFIG}")
    for name in weights:
        path = folder / name
        if not path.is_file():
            pickled = any(folder.glob("*.bin")) and name in (_WEIGHTS, _ADAPTER_WEIGHTS)
            raise ConfigError(f"push.run: {folder} lacks {name}" + (f": {ONLY_SAFETENSORS}" if pickled else ""))
        if (problem := damage(path)) is not None:
            raise ConfigError(f"push.run: {path} is damaged: {problem}; write the model again")


def _shards(folder: Path) -> list[str]:
    if not (folder / _INDEX).is_file():
        return [_WEIGHTS]
    try:
        return sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:  # cut off, or not an index
        raise ConfigError(f"push.run: {folder / _INDEX} cannot be read: {error}; write the model again") from error


def _public_json(path: Path, base: str | None) -> Path | bytes:
    """Return a JSON file with names of models on the Hub in place of paths of this machine."""
    if path.name.endswith(".index.json") or path.name == "tokenizer.json":  # large, and without such names
        return path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"push.run: {path} is not JSON: {error}; write the model again") from error
    if not isinstance(content, dict):
        return path
    paths = {name: content[name] for name in _NAMES_OF_MODELS if _is_path(content.get(name))}
    if "base_model_name_or_path" in paths and base is None:
        raise ConfigError(
            f"push.run: the adapter's base is a folder of this machine, {paths['base_model_name_or_path']}: give the "
            "name of the same model on the Hub with --base, or merge the adapter first, with vlmrl merge"
        )
    named = dict.fromkeys(paths, base) if base is not None else {}
    public = _without_paths(content) | named
    return path if public == content else (json.dumps(public, indent=2, ensure_ascii=False) + "\n").encode()


def _without_paths(value: Any) -> Any:
    """Return JSON data without names of models that are paths of this machine. Parts of a model have names, too."""
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if not (name in _NAMES_OF_MODELS and _is_path(item))}
        return {name: _without_paths(item) for name, item in kept.items()}
    return [_without_paths(item) for item in value] if isinstance(value, list) else value


def _is_path(name: object) -> bool:
    return isinstance(name, str) and name != "" and (not is_hub_id(name) or Path(name).expanduser().exists())


def _card(folder: Path, *, repo: str, base: str | None, licence: dict[str, str]) -> ModelCard | None:
    """Return the model card for the repository; None where the folder has none."""
    path = folder / CARD
    if not path.is_file() or _leads_elsewhere(path):
        return None
    text = path.read_text(encoding="utf-8").replace(THIS_FOLDER, repo)
    if (line := licence_line(licence)) is not None:
        text = text.replace(LICENCE_UNKNOWN, line)
    try:
        card = ModelCard(text)
    except ValueError as error:  # metadata that a user has edited
        raise ConfigError(f"push.run: {path}: its metadata is not valid: {error}; mend or delete the file") from error
    if base is not None:
        card.data["base_model"] = base
    if not card.data.get("license"):
        for name, value in licence.items():
            card.data[name] = value
    return card
