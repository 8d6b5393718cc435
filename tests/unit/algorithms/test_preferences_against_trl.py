"""SimPO and KTO, and their gradients, against TRL's CPOTrainer and KTOTrainer on random log-probs."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmrl.algorithms.preferences import kto_loss, simpo_loss

cpo_trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer", reason="needs TRL: pip install trl")
kto_trainer = pytest.importorskip("trl.trainer.kto_trainer", reason="needs TRL: pip install trl")

RANK = SimpleNamespace(
    device=torch.device("cpu"),
    gather_for_metrics=lambda x: x,
    gather=lambda x: x,
    num_processes=1,
    is_main_process=True,
)
PAIRS, TOKENS = 5, 7


def trainer(kind: type[Any], **values: Any) -> Any:
    made = object.__new__(kind)
    defaults = {
        "accelerator": RANK,
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "aux_loss_enabled": False,
        "_tp_size": 1,
    }
    for name, value in (defaults | values).items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("seed", range(3))
def test_simpo_equals_trls(seed: int) -> None:
    torch.manual_seed(seed)
    chosen, rejected = torch.randn(2, PAIRS)
    settings = {"loss_type": "simpo", "simpo_gamma": 0.7, "beta": 2.0, "label_smoothing": 0.0, "alpha": 0.0}
    results = []
    for ours in (True, False):
        inputs = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
        if ours:
            losses = simpo_loss(*inputs, beta=2.0, gamma=0.7)
        else:
            losses, _, _ = trainer(cpo_trainer.CPOTrainer, **settings).cpo_loss(*inputs)
        losses.sum().backward()
        results.append((losses.detach(), inputs[0].grad, inputs[1].grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("seed", range(3))
def test_kto_equals_trls(seed: int) -> None:
    torch.manual_seed(seed)
    tokens = -torch.rand(PAIRS, TOKENS)
    reference, kl_policy = -TOKENS * torch.rand(2, PAIRS)
    kl_reference = kl_policy - torch.rand(PAIRS) * (1.0 if seed else -1.0)  # a negative z counts as 0
    desirable = torch.tensor([True, False, True, True, False])
    logprobs = tokens.clone().requires_grad_()
    # Ratios are to lie around the baseline, where no sigmoid is flat.
    z = max(0.0, float((kl_policy - kl_reference).mean()))
    assert (z > 0) == (seed > 0)
    ours = kto_loss(
        logprobs.sum(dim=1) - reference,
        desirable,
        baseline=z,
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
    ).mean()
    ours.backward()

    of_trl = tokens.clone().requires_grad_()
    output = SimpleNamespace(
        log_probs=of_trl,
        entropy=torch.zeros(PAIRS, TOKENS),
        mean_logits=torch.zeros(PAIRS, TOKENS),
        is_top1=torch.zeros(PAIRS, TOKENS),
    )
    model = trainer(
        kto_trainer.KTOTrainer,
        beta=0.3,
        loss_type="kto",
        desirable_weight=1.2,
        undesirable_weight=0.7,
        calculate_KL=True,
        precompute_ref_logps=True,
        _compute_kl_logps=lambda *_: kl_policy,
    )
    ids = torch.zeros(PAIRS, TOKENS + 1, dtype=torch.long)
    batch = {
        "input_ids": ids,
        "attention_mask": ids + 1,
        "completion_mask": ids + 1,
        "label": desirable,
        "ref_logps": reference,
        "ref_KL_logps": kl_reference,
    }
    theirs = model._compute_loss(lambda **_: output, batch, return_outputs=False)
    theirs.backward()
    torch.testing.assert_close((ours.detach(), logprobs.grad), (theirs.detach(), of_trl.grad))
