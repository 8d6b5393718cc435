"""Log-probs of prompts in the distribution that responses are sampled from; vLLM's own know no bans and no temperature.

What an engine said of a token when it sampled it (decode) can then be compared with what it says of the same token when
it reads it (prefill).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlmrl.models.logprobs import BAN


def score_as_sampled(runner: Any, *, temperature: float, banned: Sequence[int]) -> None:
    """From now on the model runner's log-probs of prompts are tempered and without the `banned` tokens.

    vLLM has two model runners; either computes them in one place, from logits that pass by here.
    """
    change = partial(tempered, temperature=temperature, banned=list(banned))
    if hasattr(runner, "_get_prompt_logprobs_dict"):
        runner._get_prompt_logprobs_dict = _by_sampler(runner, change)
    elif runner.prompt_logprobs_worker is not None:  # None where the pipeline's last stage is elsewhere
        worker = runner.prompt_logprobs_worker
        worker.compute_prompt_logprobs = _by_worker(worker.compute_prompt_logprobs, change)


def tempered(logits: Tensor, *, temperature: float, banned: list[int]) -> Tensor:
    """[n, V] logits -> fp32, changed as for sampling: bans first, then the temperature."""
    logits = logits.to(torch.float32, copy=True)
    logits[:, banned] += BAN
    return logits.div_(temperature)


def _by_sampler(runner: Any, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The first runner asks its sampler, which it needs unchanged for everything else."""
    compute, sampler = runner._get_prompt_logprobs_dict, runner.sampler
    plain = sampler.compute_logprobs

    def computed(*args: Any, **kwargs: Any) -> Any:
        sampler.compute_logprobs = lambda logits: plain(change(logits))
        try:
            return compute(*args, **kwargs)
        finally:
            del sampler.compute_logprobs

    return computed


def _by_worker(compute: Callable[..., Any], change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The second runner's worker gets its logits from a function."""

    def computed(logits_fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        return compute(lambda states: change(logits_fn(states)), *args, **kwargs)

    return computed
