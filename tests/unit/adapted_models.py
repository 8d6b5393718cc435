"""Adapters of micro models, which several files of tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vlmrl.config.lora import Lora
from vlmrl.data.packing import make_pack
from vlmrl.models.adapter_plan import AdapterPlan, choose_targets, layers
from vlmrl.models.adapters import adapter_tensors
from vlmrl.models.inputs import model_inputs
from vlmrl.models.scorer import Scorer
from vlmrl.models.tiny import Family
from vlmrl.plugins import Processor

Make = Callable[..., Any]


def plan_for(net: PreTrainedModel, reader: Processor, *targets: str, **lora: Any) -> AdapterPlan:
    """Plan an adapter with these targets and settings of `ds.lora`."""
    settings = Lora.model_validate({"rank": 4, "alpha": 16.0, "target_modules": targets or ("all-linear",)} | lora)
    selected = choose_targets(settings.target_modules, layers(net, reader), frozen=())
    return AdapterPlan(
        rank=settings.rank,
        alpha=settings.alpha,
        dropout=settings.dropout,
        is_rank_stabilized=settings.use_rslora,
        has_magnitude=settings.use_dora,
        targets=tuple(selected),
        groups=frozenset(selected.values()),
    )


def randomize(net: PreTrainedModel) -> None:
    """Make every B and every magnitude nonzero, as training does."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapter_tensors(net):
            if "lora_A" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.fixture
def logprobs_of(reader: Make, sample: Make) -> Callable[[PreTrainedModel, Family], Tensor]:
    """`logprobs_of(model, family)`: log-probs of a fixed sample, with an image if the model takes images."""

    def compute(net: PreTrainedModel, family: Family) -> Tensor:
        pack = make_pack([sample(family, 1 if family.endswith("_vl") else 0, 1)], [0], "padded")
        with torch.no_grad():
            return Scorer(net).eval()(model_inputs(net, reader(family), pack)).logprobs

    return compute
