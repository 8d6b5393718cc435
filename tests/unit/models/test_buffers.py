"""Buffers that no file holds are computed in full precision, and models with rounded ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.models.buffers import check_buffers, computed_buffers, restore_buffers
from vlmrl.models.load import load_model
from vlmrl.models.value_head import value_net

Make = Callable[..., Any]
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3", "llama")


def read(folder: Make, family: str) -> Any:
    return load_model(str(folder(family)), dtype=torch.bfloat16, attn_implementation="sdpa")


def rounded(net: Any) -> Any:
    """Round the buffers, as `zero.Init` does."""
    for module in net.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[key] = buffer.bfloat16()
    return net


@pytest.mark.parametrize("family", FAMILIES)
def test_computed_buffers_equal_those_of_a_loaded_model(folder: Make, family: str) -> None:
    net = read(folder, family)
    held = {name: buffer for name, buffer in net.named_buffers() if buffer.is_floating_point()}
    computed = computed_buffers(net)
    assert computed.keys() == held.keys()
    assert all(computed[name].dtype == torch.float32 and torch.equal(computed[name], held[name]) for name in held)
    check_buffers(net)


def test_a_model_with_a_value_head_has_the_buffers_of_its_family(folder: Make) -> None:
    net = value_net(str(folder("qwen2_5_vl")), dtype=torch.bfloat16, attn_implementation="sdpa", head_seed=0)
    assert len(computed_buffers(net)) == 4
    check_buffers(net)


def test_rounded_buffers_are_refused_and_restored(folder: Make) -> None:
    net, plain = rounded(read(folder, "qwen3_vl")), read(folder, "qwen3_vl")
    with pytest.raises(VlmrlError, match=r"inv_freq .*bfloat16 instead of torch.float32.*ds\.zero_stage 2") as caught:
        check_buffers(net)
    assert "\n" not in str(caught.value)
    restore_buffers(net)
    check_buffers(net)
    wanted = dict(plain.named_buffers())
    assert all(torch.equal(buffer, wanted[name]) for name, buffer in net.named_buffers())


def test_computing_draws_no_random_number_and_does_not_change_the_model(folder: Make) -> None:
    net = read(folder, "qwen3")
    before = [parameter.detach().clone() for parameter in net.parameters()]
    torch.manual_seed(5)
    computed_buffers(net)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))


def test_a_rounded_buffer_that_cannot_be_computed_again_is_refused(folder: Make) -> None:
    net = read(folder, "llama")

    class OfItsOwn(type(net)):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("slopes", torch.ones(3), persistent=False)

    net.__class__ = OfItsOwn
    net.register_buffer("slopes", torch.full((3,), 0.3), persistent=False)
    check_buffers(net)
    restore_buffers(net)
    assert torch.equal(net.slopes, torch.full((3,), 0.3))
    with pytest.raises(ConfigError, match=r"buffer slopes .*ds\.param_dtype fp32"):
        restore_buffers(rounded(net))
