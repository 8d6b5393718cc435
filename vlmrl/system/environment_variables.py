"""Secrets in environment variables: users' functions get those that the run passes on, and nothing shows any."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping

from vlmrl.errors import ConfigError

_SECRET = re.compile(
    r"(TOKEN|SECRETS?|PASSWORD|PASSWD|_PWD|PASSPHRASE|APIKEY|CREDENTIALS?)(_|$)"
    r"|(^|_)(KEYS?|PASS|PAT|AUTH|COOKIE|DSN|CONNECTION_STRING)(_|$)"
)
_MIN_CHARS = 6
"""Shorter values are words such as `true`, and occur in any text."""


def is_secret(name: str) -> bool:
    """Whether a variable's name says that it holds a secret: HF_TOKEN, WANDB_API_KEY, GITHUB_PAT."""
    return _SECRET.search(name.upper()) is not None


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of the variables that hold secrets, longest first: one may contain another."""
    # A value that was read from a file may end with a line break, which no text repeats.
    values = {value.strip() for name, value in environment.items() if is_secret(name)}
    return sorted((value for value in values if len(value) >= _MIN_CHARS), key=lambda value: (-len(value), value))


def hide_secrets(environment: MutableMapping[str, str], *, keep: Collection[str]) -> None:
    """Remove the secrets from `environment`, except those named in `keep`."""
    for name in [name for name in environment if is_secret(name) and name not in keep]:
        del environment[name]


def check_passed(names: Iterable[str], *, setting: str) -> None:
    """Raise ConfigError if a variable that `setting` names does not exist."""
    for name in names:
        if name not in os.environ:
            raise ConfigError(f"{setting}: the environment has no variable {name}: export it, or leave it out")
