"""Limits of what an engine processes at once: responses and tokens, from the demand of the run, and videos."""

from __future__ import annotations

from typing import NamedTuple

from vlmrl.config.data import Columns
from vlmrl.config.videos import most_video_tokens
from vlmrl.plugins import Processor

MIN_PROMPTS_AT_ONCE = 64
"""Minimum number of prompts that an engine has at once, if it gets as many."""
_MIN_TOKENS = 2048
"""Fewer tokens per step would save little memory and split every prompt."""


class Demand(NamedTuple):
    """Maximum numbers of one engine's requests in flight."""

    responses: int
    prompts: int
    prompt_tokens: int
    """Tokens of the longest prompt, image tokens included."""


class Limits(NamedTuple):
    """vLLM's settings of the same names."""

    max_num_seqs: int
    """Responses that are decoded at the same time."""
    max_num_batched_tokens: int
    """Tokens of one step of the engine: those of prefilled prompts, and one of each decoded response."""


CPU_LIMITS = Limits(128, 2048)
"""Upper limits on a CPU, which is no faster with larger ones."""


def prompts_at_once(num_prompts: int, num_engines: int) -> int:
    """Return the number of prompts that an engine has at a time: enough to fill its batch, but so few that a slow
    engine gets fewer in total.
    """
    target = max(MIN_PROMPTS_AT_ONCE, -(-num_prompts // (2 * num_engines)))
    return min(target, -(-num_prompts // num_engines))


def choose_limits(
    demand: Demand | None,
    upper: Limits,
    *,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    video_tokens: int = 0,
) -> Limits:
    """Choose limits that fit the demand, and at most `upper`.

    Fewer responses need less memory for logits and fewer CUDA graphs. A step can prefill all prompts at once, if
    `upper` allows it.

    Args:
        demand: None if it is not known; the limits are then `upper`.
        upper: vLLM's defaults for offline inference on this device.
        max_num_seqs: the user's value, which is used as it is.
        max_num_batched_tokens: the user's value, likewise.
        video_tokens: those of the largest video. vLLM refuses one of more tokens than a step has, so they come before
            `upper`.
    """
    seqs, tokens = upper
    if demand is not None:
        seqs = min(seqs, max(1, demand.responses))
        tokens = min(tokens, max(_MIN_TOKENS, demand.responses + demand.prompts * demand.prompt_tokens))
    if max_num_seqs is not None:
        seqs = max_num_seqs
    # vLLM refuses more responses than tokens per step.
    if max_num_batched_tokens is None:
        return Limits(seqs, max(tokens, seqs, video_tokens))
    return Limits(seqs if max_num_seqs is not None else min(seqs, max_num_batched_tokens), max_num_batched_tokens)


def format_limits(limits: Limits) -> str:
    """Return one line for users."""
    return f"each engine: up to {limits.max_num_seqs} responses and {limits.max_num_batched_tokens} tokens at once"


class VideoDemand(NamedTuple):
    """Videos that an engine has to take."""

    number: int
    """The most of a prompt."""
    tokens: int
    """Those of the largest."""


def video_demand(columns: Columns, processor: Processor) -> VideoDemand:
    """Return the videos of a run. vLLM reserves memory for as many of a prompt, of the largest size that it knows of,
    and for as many tokens as it encodes in one step.
    """
    if columns.video_key is None or processor.frame_factor is None or processor.resize_factor is None:
        return VideoDemand(0, 0)
    return VideoDemand(columns.max_videos_per_prompt, most_video_tokens(columns, side=processor.resize_factor))
