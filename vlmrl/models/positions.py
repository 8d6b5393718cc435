"""The length of the sequences that a model was built for."""

from __future__ import annotations

import os
from typing import Any

from vlmrl.errors import ConfigError
from vlmrl.plugins import MODEL_FLAG, first_line, located

_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embedding whose `max_position_embeddings` count what `factor` adds, as vLLM takes them."""


def positions(path: str, *, trust_remote_code: bool = False) -> int | None:
    """Positions of the model in the folder or Hub id `path`, from its configuration alone; None where it names none.

    Raises ConfigError when there is no such model.
    """
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(located(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{MODEL_FLAG}: {path} is not a model that can be read: {first_line(error)}") from error
    text: Any = whole.get_text_config()
    found = [int(value) for key in _KEYS if (value := getattr(text, key, None)) is not None]
    if not found:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    factor = 1.0 if rope.get("rope_type") in _SCALED_ALREADY else rope.get("factor") or 1.0
    return int(max(found) * factor)


def check_length(path: str, tokens: int, *, said: str, trust_remote_code: bool = False) -> None:
    """Raise ConfigError when an engine would refuse sequences of so many tokens; `said` names the settings that add up
    to them."""
    known = positions(path, trust_remote_code=trust_remote_code)
    if known is not None and tokens > known and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") in ("", "0"):
        raise ConfigError(f"{said} are {tokens} tokens, and {path} has {known} positions: lower one of them")
