"""Log-probs of prompts in the sampling distribution, for both of vLLM's model runners."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from vlmrl.models.logprobs import BAN
from vlmrl.rollout.prompt_scores import adjust_logits, score_as_sampled

LOGITS = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 3.0]], dtype=torch.bfloat16)
EXPECTED = ((LOGITS.float() + torch.tensor([0.0, BAN, 0.0])) / 0.5).log_softmax(-1)


class Sampler(torch.nn.Module):
    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        return logits.log_softmax(dim=-1, dtype=torch.float32)


class OlderRunner:
    """Calls its sampler, as vLLM's runner for CPUs does."""

    def __init__(self) -> None:
        self.sampler = Sampler()

    def _get_prompt_logprobs_dict(self, states: Tensor, *, fails: bool = False) -> Tensor:
        if fails:
            raise RuntimeError("failed")
        return self.sampler.compute_logprobs(states)


class Worker:
    """Gets logits from a function, as that of vLLM's runner for GPUs does."""

    def compute_prompt_logprobs(self, logits_fn: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        return logits_fn(states).log_softmax(dim=-1, dtype=torch.float32)


def test_bans_apply_before_the_temperature() -> None:
    before = LOGITS.clone()
    assert adjust_logits(LOGITS, temperature=0.5, banned=[1]).tolist() == [
        [2.0, 2 * (2 + BAN), 8.0],
        [0.0, 2 * BAN, 6.0],
    ]
    assert torch.equal(LOGITS, before)


def test_the_older_runner_scores_prompts_as_it_samples_and_samples_as_before() -> None:
    runner = OlderRunner()
    score_as_sampled(runner, temperature=0.5, banned=[1])
    torch.testing.assert_close(runner._get_prompt_logprobs_dict(LOGITS), EXPECTED)
    torch.testing.assert_close(runner.sampler.compute_logprobs(LOGITS), LOGITS.float().log_softmax(-1))
    with pytest.raises(RuntimeError, match="failed"):
        runner._get_prompt_logprobs_dict(LOGITS, fails=True)
    torch.testing.assert_close(runner.sampler.compute_logprobs(LOGITS), LOGITS.float().log_softmax(-1))


def test_the_newer_runner_scores_prompts_as_it_samples() -> None:
    runner = SimpleNamespace(prompt_logprobs_worker=Worker())
    score_as_sampled(runner, temperature=0.5, banned=[1])
    logprobs = runner.prompt_logprobs_worker.compute_prompt_logprobs(lambda states: 2 * states, LOGITS / 2)
    torch.testing.assert_close(logprobs, EXPECTED)
    score_as_sampled(SimpleNamespace(prompt_logprobs_worker=None), temperature=0.5, banned=[1])
