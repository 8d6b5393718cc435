"""Settings as plain values in each checkpoint, and their changes in a resumed run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlmrl.config.names import setting_value
from vlmrl.config.verb_base import VerbConfig

_IGNORED = ("ckpt.load_enable", "ckpt.output_dir")
"""The output folder and resuming do not change training."""
_MAX_CHARS = 60
"""Longest value in a message."""


def plain_settings(config: VerbConfig) -> dict[str, Any]:
    """Full name -> JSON value of every setting that the run reads."""
    unread = config.unread()
    names = (name for name in type(config).settings() if name not in unread and name not in _IGNORED)
    return {name: json.loads(json.dumps(setting_value(config, name), default=str)) for name in names}


def changed_settings(before: Mapping[str, Any], config: VerbConfig) -> dict[str, tuple[Any, Any]]:
    """Setting -> (old, new), for settings that both runs read and that differ."""
    now = plain_settings(config)
    return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}


def format_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Format changes: `rollout.batch_size 64 -> 128, actor.adam.lr 1e-06 -> 1e-05`."""
    return ", ".join(f"{name} {_format(old)} -> {_format(new)}" for name, (old, new) in changed.items())


def _format(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
