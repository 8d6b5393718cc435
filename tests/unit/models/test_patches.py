"""A patch embedding as a product is the convolution that it was: values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vlmrl.models.patches import PatchProjection, project_patches


def tower(**changes: Any) -> nn.Module:
    settings = {"kernel_size": (2, 3, 3), "stride": (2, 3, 3)} | changes
    return nn.ModuleDict({"patch_embed": nn.ModuleDict({"proj": nn.Conv3d(3, 5, **settings)})})


@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_convolution(bias: bool) -> None:
    torch.manual_seed(0)
    net = tower(bias=bias)
    layer = net.patch_embed.proj
    patches = torch.randn(7, 3, 2, 3, 3, requires_grad=True)
    expected = layer(patches)
    weights = torch.randn_like(expected)
    inputs = [patches, *layer.parameters()]
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    names = list(net.state_dict())
    project_patches(net)
    assert isinstance(layer, PatchProjection)
    assert list(net.state_dict()) == names
    found = layer(patches)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", [{"stride": (1, 3, 3)}, {"padding": 1}, {"dilation": (1, 2, 1)}])
def test_a_convolution_that_sees_more_than_one_patch_stays_one(change: dict[str, Any]) -> None:
    net = tower(**change)
    project_patches(net)
    assert type(net.patch_embed.proj) is nn.Conv3d


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_every_family_has_the_layer(net: Callable[..., Any], family: str) -> None:
    assert isinstance(net(family).base_model.visual.patch_embed.proj, PatchProjection)
