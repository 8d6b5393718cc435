"""Settings as plain values, kept with each checkpoint, and what a run that goes on has changed of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlmrl.config.names import value
from vlmrl.config.verb import Run

_OF_THIS_START = ("ckpt.load_enable", "ckpt.output_dir")
"""Where a run lies and that it goes on: no change of what is learnt."""
_LONGEST = 60
"""Characters of a value that are shown."""


def plain_settings(config: Run) -> dict[str, Any]:
    """Full name -> value, as JSON has it, of every setting that the run reads."""
    unread = config.unread()
    names = (name for name in type(config).settings() if name not in unread and name not in _OF_THIS_START)
    return {name: json.loads(json.dumps(value(config, name), default=str)) for name in names}


def changes(before: Mapping[str, Any], config: Run) -> dict[str, tuple[Any, Any]]:
    """Setting -> (old, new) of those that both runs read and that differ."""
    now = plain_settings(config)
    return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}


def described(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """`rollout.batch_size 64 -> 128, actor.adam.lr 1e-06 -> 1e-05`"""
    return ", ".join(f"{name} {_shown(old)} -> {_shown(new)}" for name, (old, new) in changed.items())


def _shown(held: Any) -> str:
    text = held if isinstance(held, str) else json.dumps(held, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
