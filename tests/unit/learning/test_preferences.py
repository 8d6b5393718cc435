"""The loss of preferences on packs: values and gradients do not depend on layout and division. With DeepSpeed:
end_to_end/test_preference_ranks.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_batches import batch

from vlmrl.algorithms.preference_loss import Offsets, PreferenceLoss
from vlmrl.data.balance import spread
from vlmrl.data.packing import Pack
from vlmrl.data.preference_step import PreferenceStep, chosen_tokens, kept_together, summed
from vlmrl.learning.forward import LogprobForward
from vlmrl.learning.preferences import PreferenceLearner, preference_metrics
from vlmrl.models import tiny
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.observe.metrics import merge, reduce
from vlmrl.plugins import processor
from vlmrl.types import Floats, Layout, Sample

torch.set_num_threads(1)

CPU = torch.device("cpu")
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"label_smoothing": 0.1, "nll_coef": 0.5},
    "ipo": {},
    "simpo": {"simpo_gamma": 0.3},
    "orpo": {},
    "bco": {},
    "mpo": {"nll_coef": 1.0},
    "kto": {"kto_weights": (1.0, 0.7)},
}


class Learner(PreferenceLearner):
    """A learner without an engine, whose passes add gradients to its model."""

    def __init__(self, family: tiny.Family, folder: Path) -> None:
        path = str(tiny.build(family, folder / family, size="micro"))
        net = load_model(path, dtype=torch.float32, attn_implementation=implementation("auto", CPU))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        self.read = processor(path, min_pixels=3136, max_pixels=100_000)
        self._net, self._device = net, CPU
        self._forward = LogprobForward(Scorer(net), self.read, temperature=1.0, bans=False, device=CPU, cache_bytes=0)

    def divided(self, samples: Sequence[Sample], num_ranks: int, layout: Layout, max_tokens: int) -> list[Pack]:
        """The packs of all ranks."""
        ranks = spread(
            samples,
            num_ranks=num_ranks,
            layout=layout,
            max_tokens=max_tokens,
            max_samples=None,
            image_cost=lambda image: 4.0,
            filler=self.read.dummy_sample(),
            whole_responses=True,
        )
        return [pack for rank in ranks for pack in rank]

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        by_id = dict(self._forward.logprobs(self.divided(samples, 1, "padded", 1)))
        return [by_id[i] for i in range(len(samples))]

    def step(self, packs: Sequence[Pack], step: PreferenceStep) -> tuple[float, dict[str, float], dict[str, Any]]:
        """Return the loss of a step, its metrics, and the gradient of each parameter."""
        self._net.zero_grad()
        total, metrics = 0.0, []
        for pack in packs:
            share, sums = self._preference_loss(pack, step)
            share.backward()
            total += float(share.detach())
            metrics.append(preference_metrics({name: float(value) for name, value in sums.items()}))
        gradients = {name: p.grad.clone() for name, p in self._net.named_parameters() if p.grad is not None}
        return total, reduce([merge(metrics)]), gradients


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3"])
def learner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return Learner(request.param, tmp_path_factory.mktemp("models"))


def pairs(learner: Learner) -> list[Sample]:
    """Pairs with one image, none and two, and one whose responses have images of their own."""
    if learner.read.resize_factor is None:
        rng = np.random.default_rng(0)
        rows = []
        for number in range(8):
            prompt = np.random.default_rng(number // 2).integers(97, 122, 4 + number // 2)
            tokens = np.concatenate([prompt, rng.integers(97, 122, 2 + number)])
            rows.append(Sample(tokens, np.arange(len(tokens)) >= len(prompt), group=number // 2))
    else:
        rows = batch(learner.read)
        own = {"shares_prompt": False, "num_prompt_images": None, "group": 3}
        rows[6:] = [replace(rows[7], **own), replace(rows[5], **own)]
    return [replace(row, response=number) for number, row in enumerate(rows)]


def make_step(kind: str, learner: Learner, rows: Sequence[Sample]) -> PreferenceStep:
    settings = PreferenceLoss(kind=kind, beta=0.3, **LOSSES[kind])
    noise = np.random.default_rng(2).normal(size=len(rows))
    return PreferenceStep(
        settings=settings,
        reference=summed(rows, learner.logprobs(rows)) + noise,
        desirable=np.array([True, False, False, True, True, False, True, False]) if kind == "kto" else None,
        offsets=Offsets(delta=0.2, baseline=0.4),
        num_chosen_tokens=chosen_tokens(rows),
    )


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradient_do_not_depend_on_layout_ranks_and_packs(learner: Learner, kind: str) -> None:
    rows = pairs(learner)
    step = make_step(kind, learner, rows)
    samples = rows if kind == "kto" else kept_together(rows)
    loss, metrics, gradients = learner.step(learner.divided(samples, 1, "padded", 1), step)
    assert loss != 0
    assert gradients
    for num_ranks, layout, max_tokens in ((1, "packed", 60), (1, "shared", 10_000), (2, "shared", 60)):
        packs = learner.divided(samples, num_ranks, layout, max_tokens)  # type: ignore[arg-type]
        other_loss, other_metrics, other = learner.step(packs, step)
        assert other_loss == pytest.approx(loss, abs=1e-5)
        assert other_metrics == pytest.approx(metrics, abs=1e-4)
        assert other.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_metrics_of_a_step_by_hand(learner: Learner) -> None:
    rows = pairs(learner)
    logprobs = summed(rows, learner.logprobs(rows))
    step = replace(make_step("dpo", learner, rows), reference=logprobs - np.array([1.0, 0, 0, 1, 2, 2, 0, -3]))
    _, metrics, _ = learner.step(learner.divided(kept_together(rows), 2, "shared", 60), step)
    # Rewards are 0.3 times 1, 0 | 0, 1 | 2, 2 | 0, -3; the third margin is 0 up to rounding.
    assert metrics["dpo/margin"] == pytest.approx(0.3 * (1 - 1 + 0 + 3) / 4, abs=1e-4)
    assert metrics["dpo/accuracy"] in (0.5, 0.625, 0.75)
    assert metrics["dpo/reward_chosen"] == pytest.approx(0.3 * 3 / 4, abs=1e-4)
    assert metrics["dpo/reward_rejected"] == pytest.approx(0.0, abs=1e-4)
    assert metrics["dpo/logprob_chosen"] == pytest.approx(logprobs[0::2].mean(), abs=1e-3)
    assert metrics["dpo/logprob_rejected"] == pytest.approx(logprobs[1::2].mean(), abs=1e-3)
    assert metrics["dpo/nll"] == pytest.approx(-logprobs[0::2].sum() / chosen_tokens(rows), abs=1e-4)
