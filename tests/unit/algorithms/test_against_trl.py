"""Our losses and their gradients against those of TRL's GRPOTrainer and DPOTrainer, on random responses with gaps and
padding.

TRL is asked for nothing but its `_compute_loss`: the log-probabilities come from the test instead of from a model.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.algorithms.aggregation import reduce
from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.losses import PolicyLoss, policy_loss
from vlmrl.algorithms.preferences import dpo_loss, ipo_loss, response_means, response_sums
from vlmrl.types import Totals

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs TRL: pip install trl")
dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="needs TRL: pip install trl")

ANSWERS, TOKENS, LONGEST = 6, 9, 16


class Batch:
    """Random responses. Log-ratios are wide enough for every clip to act; one response has no sampled token."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        shape = (ANSWERS, TOKENS)
        lengths = torch.randint(1, TOKENS + 1, (ANSWERS, 1))
        self.completion = torch.arange(TOKENS) < lengths
        self.by_policy = torch.rand(shape) < 0.8
        self.by_policy[0] = False
        self.sampled = self.completion & self.by_policy
        self.logprobs = -2 * torch.rand(shape)
        self.old = self.logprobs + 0.5 * torch.randn(shape)
        self.rollout = self.old + 0.5 * torch.randn(shape)
        self.reference = self.logprobs + 0.5 * torch.randn(shape)
        self.entropy = torch.rand(shape)
        self.advantages = torch.randn(ANSWERS, 1)


def of_trl(batch: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
    """TRL's loss, and its gradient by the log-probabilities [B, T]."""
    logprobs = batch.logprobs.clone().requires_grad_()
    entropy = batch.entropy.clone().requires_grad_()
    trainer = object.__new__(grpo_trainer.GRPOTrainer)
    weights = settings.pop("weights", None)
    defaults: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "max_completion_length": LONGEST,
        "args": SimpleNamespace(delta=settings.pop("delta", None), use_bias_correction_kl=False),
        "use_vllm": weights is not None,
        "vllm_importance_sampling_correction": True,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_adaptive_entropy": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, entropy, None),
    }
    for name, value in (defaults | settings).items():
        setattr(trainer, name, value)
    trainer.args.steps_per_generation = trainer.steps_per_generation = 1
    trainer._entropy_bonus_enabled = trainer.entropy_coef > 0
    prompts = torch.zeros(ANSWERS, 1, dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompts,
            "prompt_mask": prompts + 1,
            "completion_ids": torch.zeros(ANSWERS, TOKENS, dtype=torch.long),
            "completion_mask": batch.completion.long(),
            "tool_mask": batch.by_policy.long(),
            "advantages": batch.advantages[:, 0],
            "old_per_token_logps": batch.old,
            "ref_per_token_logps": batch.reference,
            "importance_sampling_ratio": weights,
            "num_items_in_batch": batch.sampled.sum(),
        },
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


def of_ours(batch: Batch, *, kl_coef: float = 0.0, **knobs: Any) -> tuple[Tensor, Tensor]:
    logprobs = batch.logprobs.clone().requires_grad_()
    loss = PolicyLoss(**({"max_tokens": LONGEST, "kl_estimator": "k3"} | knobs))
    owner = torch.arange(ANSWERS)[:, None].expand(-1, TOKENS)
    terms = policy_loss(
        loss,
        logprobs=logprobs,
        old=batch.old,
        rollout=batch.rollout,
        advantages=batch.advantages.expand(-1, TOKENS),
        sampled=batch.sampled,
        owner=owner,
        entropy=batch.entropy.clone().requires_grad_(),
        reference=batch.reference,
        kl_coef=kl_coef,
    )
    share = reduce(
        terms.losses,
        batch.sampled,
        aggregation=loss.aggregation,
        lengths=batch.sampled.sum(dim=1, keepdim=True).expand(-1, TOKENS),
        totals=Totals(num_tokens=int(batch.sampled.sum()), num_responses=ANSWERS),
        max_tokens=LONGEST,
    )
    share.backward()
    assert logprobs.grad is not None
    return share.detach(), logprobs.grad


CASES = {
    "grpo with a kl": ({"aggregation": "sequence", "kl_coef": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    "dapo's clip-higher": ({"aggregation": "token", "clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dapo with an entropy bonus": (
        {"aggregation": "token", "entropy_coef": 0.2},
        {"loss_type": "dapo", "entropy_coef": 0.2},
    ),
    "dr_grpo": ({"aggregation": "constant"}, {"loss_type": "dr_grpo"}),
    "dual clip": ({"aggregation": "token", "dual_clip": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "gspo": (
        {"aggregation": "sequence", "kind": "gspo", "clip_low": 0.05, "clip_high": 0.1},
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    ),
    # TRL's epsilon_high of CISPO is the bound of the weight itself.
    "cispo": ({"aggregation": "token", "kind": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.2}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trls(case: str, seed: int) -> None:
    ours, theirs = CASES[case]
    batch = Batch(seed)
    torch.testing.assert_close(of_ours(batch, **ours), of_trl(batch, **theirs))


@pytest.mark.parametrize("kind", ["tis", "icepop"])
def test_a_corrected_loss_equals_trls(kind: str) -> None:
    batch = Batch(7)
    weights = (batch.old - batch.rollout).exp()
    outside = (weights < 0.7) | (weights > 1.5)
    weights = weights.masked_fill(outside, 0.0) if kind == "icepop" else weights.clamp(0.7, 1.5)
    assert bool(outside[batch.sampled].any())
    ours = of_ours(batch, aggregation="token", kl_coef=0.3, correction=Correction(kind, 0.7, 1.5))  # type: ignore[arg-type]
    torch.testing.assert_close(ours, of_trl(batch, loss_type="dapo", beta=0.3, weights=weights))


# ---- pairs


def pairs_of_trl(batch: Batch, *, ref: Tensor, num_pairs: int, **settings: Any) -> tuple[Tensor, Tensor]:
    """TRL's loss of the first responses against the last ones, and its gradient by the log-probabilities [B, T]."""
    logprobs = batch.logprobs[: 2 * num_pairs].clone().requires_grad_()
    sampled = batch.sampled[: 2 * num_pairs]
    message = SimpleNamespace(
        log_probs=torch.where(sampled, logprobs, 0.0),
        entropy=torch.zeros_like(sampled, dtype=torch.float),
        mean_logits=torch.zeros_like(sampled, dtype=torch.float),
        is_top1=torch.zeros_like(sampled),
    )
    trainer = object.__new__(dpo_trainer.DPOTrainer)
    defaults: dict[str, Any] = {
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x),
        "loss_weights": [1.0],
        "beta": 0.3,
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "precompute_ref_logps": True,
        "use_weighting": False,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in (defaults | settings).items():
        setattr(trainer, name, value)
    # Its log-probs start at the second token.
    tokens = torch.zeros(2 * num_pairs, TOKENS + 1, dtype=torch.long)
    inputs = {
        "input_ids": tokens,
        "attention_mask": tokens + 1,
        "completion_mask": torch.nn.functional.pad(sampled.long(), (1, 0)),
        "ref_chosen_logps": ref[:num_pairs],
        "ref_rejected_logps": ref[num_pairs:],
    }
    loss = trainer._compute_loss(lambda **_: message, inputs, return_outputs=False)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


PAIRS = {
    "dpo": (dpo_loss, response_sums, {}, {"loss_types": ["sigmoid"]}),
    "ipo": (ipo_loss, response_means, {}, {"loss_types": ["ipo"]}),
    # TRL's own cDPO is gone; of a single pair, the loss of AOT is the same.
    "cdpo": (dpo_loss, response_sums, {"label_smoothing": 0.2}, {"loss_types": ["aot"], "label_smoothing": 0.2}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", PAIRS)
def test_the_preference_loss_and_its_gradient_equal_trls(case: str, seed: int) -> None:
    loss, combine, knobs, settings = PAIRS[case]
    batch, num_pairs = Batch(seed), 1 if case == "cdpo" else ANSWERS // 2
    # One row may hold several responses: here all of them are in one.
    shape = (1, 2 * num_pairs * TOKENS)
    owner = torch.arange(2 * num_pairs).repeat_interleave(TOKENS)[None]
    sampled = batch.sampled[: 2 * num_pairs].reshape(shape)

    def of_answers(values: Tensor) -> tuple[Tensor, Tensor]:
        result = combine(values[: 2 * num_pairs].reshape(shape), sampled, owner, num_responses=2 * num_pairs)
        return result[:num_pairs], result[num_pairs:]

    logprobs = batch.logprobs[: 2 * num_pairs].clone().requires_grad_()
    (chosen, rejected), (ref_chosen, ref_rejected) = of_answers(logprobs), of_answers(batch.reference)
    ours = loss(chosen, rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected, beta=0.3, **knobs).mean()
    ours.backward()
    # TRL gets sums in all cases, and averages them itself.
    ref = response_sums(batch.reference[: 2 * num_pairs].reshape(shape), sampled, owner, num_responses=2 * num_pairs)
    theirs = pairs_of_trl(batch, ref=ref, num_pairs=num_pairs, **settings)
    torch.testing.assert_close((ours.detach(), logprobs.grad), theirs)
