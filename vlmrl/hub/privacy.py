"""Remove from published text what names this machine, and values of secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmrl.system.environment_variables import secret_values

_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://[^\s'\"]+", re.IGNORECASE)
_ABSOLUTE = re.compile(r"(?<![\w.:/<…])(?:~[\w-]*)?/(?:[^/'\",:?]+/)*(?=[^/])")
"""The folders of an absolute path, which may follow another one after a comma or a quote."""
_HIDDEN = "(hidden)"


def public_value(value: Any) -> Any:
    """Return a setting's value without folders of absolute paths, and without the hosts and paths of URLs.

    Example: `/home/me/data/mine.jsonl?size=3` -> `…/mine.jsonl?size=3`, `http://10.0.0.7:8000/score` -> `http://…`.
    """
    if isinstance(value, str):
        return _ABSOLUTE.sub("…/", _URL.sub(r"\1://…", value))
    if isinstance(value, Mapping):
        return {public_value(key): public_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public_value(item) for item in value]
    return value


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the text without the values of variables whose names say that they hold a secret, and without the paths of
    this user's folders."""
    for secret in secret_values(os.environ if environment is None else environment):
        text = text.replace(secret, _HIDDEN)
    for folder in (Path.cwd(), Path.home()):
        if folder != Path("/"):
            text = re.sub(rf"{re.escape(str(folder))}(?![\w.-])", "…", text)
    return text
