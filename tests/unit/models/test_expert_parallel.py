"""Ranks that share the experts of a model compute what one rank does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.errors import ConfigError
from vlmrl.models.expert_parallel import (
    ExpertGroup,
    check_expert_parallel,
    expert_layers,
    is_shared,
    share_experts,
    whole_experts,
)
from vlmrl.models.experts import plain_experts
from vlmrl.models.quantize import true_shape

Make = Callable[..., Any]
IDS = torch.arange(2 * 11).view(2, 11) * 7 % 256
"""A row for each rank."""


def spread(net: nn.Module) -> ExpertGroup:
    """Leave this rank its share of the experts."""
    handle = torch.distributed.group.WORLD
    assert handle is not None
    group = ExpertGroup(handle, torch.distributed.get_rank(), torch.distributed.get_world_size())
    for layer in expert_layers(net):
        own = dict(layer.named_parameters(recurse=False))
        shares = {name: nn.Parameter(p.data.chunk(group.size)[group.rank].clone()) for name, p in own.items()}
        share_experts(layer, group, shares)
    return group


def step(net: PreTrainedModel, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the rows `ids`, and gradients of a loss that adds up over rows."""
    logits = net(input_ids=ids).logits
    logits.log_softmax(-1).square().sum().div(1e4).backward()
    return logits.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
@pytest.mark.parametrize("kernel", ["grouped_mm", "eager", "batched_mm"])
def test_logits_and_gradients_are_those_of_one_rank(net: Make, tmp_path: Path, family: str, kernel: str) -> None:
    model: PreTrainedModel = net(family)
    model.set_experts_implementation(kernel)
    logits, gradients = step(model, IDS)
    model.zero_grad()

    def work() -> Any:
        rank = spread(model).rank
        shares = {name for name, p in model.named_parameters() if is_shared(p)}
        return *step(model, IDS[rank : rank + 1]), shares

    by_rank = on_ranks(2, work, tmp_path)
    shares = by_rank[0][2]
    assert len(shares) == 4, "two parameters in each of two layers"
    torch.testing.assert_close(torch.cat([of_rank[0] for of_rank in by_rank]), logits, atol=1e-5, rtol=1e-5)
    for name, expected in gradients.items():
        parts = [of_rank[1][name] for of_rank in by_rank]
        mine = torch.cat(parts) if name in shares else parts[0] + parts[1]
        assert float((mine - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max())), name


def test_a_rank_whose_experts_nobody_chooses_still_has_gradients(net: Make, tmp_path: Path) -> None:
    model: PreTrainedModel = net("qwen3_moe")

    def work() -> tuple[bool, float, float]:
        layers = expert_layers(model)
        group = spread(model)
        for layer in layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0], args[1] % 2, args[2]))
        _, gradients = step(model, IDS[group.rank : group.rank + 1])
        (name, *_) = [name for name, p in model.named_parameters() if is_shared(p)]
        with plain_experts(model):  # another kernel, for rows of another type
            _, again = step(model.double(), IDS[group.rank : group.rank + 1])
        return name in gradients, float(gradients[name].abs().max()), float(again[name].abs().max())

    first, second = on_ranks(2, work, tmp_path)
    assert first[0]
    assert min(first[1:]) > 0.0
    assert second == (True, 0.0, 0.0)


def test_parameters_are_whole_within_a_context(net: Make, tmp_path: Path) -> None:
    model: PreTrainedModel = net("qwen3_vl_moe")
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}

    def work() -> None:
        group = spread(model)
        assert {name: true_shape(p) for name, p in model.named_parameters()} == {
            name: tuple(p.shape) for name, p in expected.items()
        }
        shared = {name: p for name, p in model.named_parameters() if is_shared(p)}
        with whole_experts(list(shared.values())):
            for name, parameter in shared.items():
                assert torch.equal(parameter, expected[name])
        for name, parameter in shared.items():
            assert torch.equal(parameter, expected[name].chunk(2)[group.rank])

    on_ranks(2, work, tmp_path)


def test_a_size_that_does_not_divide_the_experts_is_refused(net: Make) -> None:
    with pytest.raises(ConfigError, match="3 does not divide the 4 experts of a layer: use one of 1, 2, 4"):
        check_expert_parallel(net("qwen3_moe"), 3)
    assert expert_layers(net("qwen3")) == []
