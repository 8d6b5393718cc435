"""How many responses and tokens an engine takes on at once, chosen from what the run will ask of it."""

from __future__ import annotations

from typing import NamedTuple

LEAST_DEPTH = 64
"""Prompts that an engine is given at once, if there are so many."""
_LEAST_TOKENS = 2048
"""Fewer tokens in a step would save little memory and cut every prompt into pieces."""


class Demand(NamedTuple):
    """The most that one engine has under way."""

    responses: int
    prompts: int
    prompt_tokens: int
    """Of the longest prompt, image tokens included."""


class Limits(NamedTuple):
    """vLLM's settings of the same names."""

    max_num_seqs: int
    """Responses that are decoded together."""
    max_num_batched_tokens: int
    """Tokens of one step of the engine: of prompts that are prefilled, and one of each response that is decoded."""


CPU = Limits(128, 2048)
"""The most on a CPU, which computes no faster with more."""


def prompts_at_once(num_prompts: int, num_engines: int) -> int:
    """How many of its prompts an engine is given at a time: enough to keep its batch full, and so few that a slow
    engine gets fewer in all.
    """
    depth = max(LEAST_DEPTH, -(-num_prompts // (2 * num_engines)))
    return min(depth, -(-num_prompts // num_engines))


def choose_limits(
    demand: Demand | None, most: Limits, *, max_num_seqs: int | None, max_num_batched_tokens: int | None
) -> Limits:
    """Room for what is under way at once, and no more than `most`.

    Fewer responses cost less memory for logits and fewer CUDA graphs to capture. A step has room to prefill all prompts
    at once, if `most` allows it.

    Args:
        demand: None where it is not known: then it is `most`.
        most: what vLLM takes on this device for offline work.
        max_num_seqs: the user's, which is taken as it is.
        max_num_batched_tokens: the user's.
    """
    seqs, tokens = most
    if demand is not None:
        seqs = min(seqs, max(1, demand.responses))
        tokens = min(tokens, max(_LEAST_TOKENS, demand.responses + demand.prompts * demand.prompt_tokens))
    if max_num_seqs is not None:
        seqs = max_num_seqs
    # vLLM refuses more responses than a step has tokens.
    if max_num_batched_tokens is None:
        return Limits(seqs, max(tokens, seqs))
    return Limits(seqs if max_num_seqs is not None else min(seqs, max_num_batched_tokens), max_num_batched_tokens)


def described(limits: Limits) -> str:
    """For people."""
    return f"each engine: up to {limits.max_num_seqs} responses and {limits.max_num_batched_tokens} tokens at once"
