"""Maximum sequence length of a model."""

from __future__ import annotations

import os
from typing import Any

from vlmrl.errors import ConfigError
from vlmrl.models.kind import read_config

_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_INCLUDE_FACTOR = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Types of rotary embedding whose `max_position_embeddings` include `factor`, as in vLLM."""


def max_positions(path: str, *, trust_remote_code: bool = False) -> int | None:
    """Read the number of positions of the model `path`, a folder or Hub id, from its config; None if it has none.

    Raises ConfigError when there is no such model.
    """
    config = read_config(path, trust_remote_code=trust_remote_code)
    text: Any = config.get_text_config()
    lengths = [int(value) for key in _KEYS if (value := getattr(text, key, None)) is not None]
    if not lengths:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    factor = 1.0 if rope.get("rope_type") in _INCLUDE_FACTOR else rope.get("factor") or 1.0
    return int(max(lengths) * factor)


def check_length(path: str, tokens: int, *, settings: str, trust_remote_code: bool = False) -> None:
    """Raise ConfigError when an engine would refuse sequences of this many tokens.

    `settings` names the settings whose sum `tokens` is.
    """
    limit = max_positions(path, trust_remote_code=trust_remote_code)
    if limit is not None and tokens > limit and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") in ("", "0"):
        raise ConfigError(f"{settings} are {tokens} tokens, and {path} has {limit} positions: lower one of them")
