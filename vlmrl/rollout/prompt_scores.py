"""Let vLLM score prompts in the sampling distribution: its own log-probs of prompts ignore bans and temperature.

The log-prob of a token when it was sampled (decode) can then be compared with that of the same token in a prompt
(prefill).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmrl.models.logprobs import BAN


def score_as_sampled(runner: Any, *, temperature: float, banned: Sequence[int]) -> None:
    """Patch the model runner: its log-probs of prompts apply the bans and the temperature from now on.

    vLLM has two model runners, and each computes them in one function.
    """
    adjust = partial(adjust_logits, temperature=temperature, banned=list(banned))
    if hasattr(runner, "_get_prompt_logprobs_dict"):
        runner._get_prompt_logprobs_dict = _patch_sampler(runner, adjust)
    elif runner.prompt_logprobs_worker is not None:  # None where the last stage of the pipeline runs elsewhere
        worker = runner.prompt_logprobs_worker
        worker.compute_prompt_logprobs = _patch_worker(worker.compute_prompt_logprobs, adjust)


def adjust_logits(logits: Tensor, *, temperature: float, banned: list[int]) -> Tensor:
    """Apply bans, then the temperature, to [T, V] logits, as sampling does; returns fp32."""
    logits = logits.to(torch.float32, copy=True)
    logits[:, banned] += BAN
    return logits.div_(temperature)


def _patch_sampler(runner: Any, adjust: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The older runner calls its sampler, which must not change for anything else."""
    compute, sampler = runner._get_prompt_logprobs_dict, runner.sampler
    plain = sampler.compute_logprobs

    def adjusted(*args: Any, **kwargs: Any) -> Any:
        sampler.compute_logprobs = lambda logits: plain(adjust(logits))
        try:
            return compute(*args, **kwargs)
        finally:
            del sampler.compute_logprobs

    return adjusted


def _patch_worker(compute: Callable[..., Any], adjust: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The newer runner's worker gets its logits from a function argument."""

    def adjusted(logits_fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        return compute(lambda states: adjust(logits_fn(states)), *args, **kwargs)

    return adjusted
