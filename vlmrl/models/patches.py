"""The first layer of a vision tower as the product that it is: PyTorch's 3-D convolutions are slow at it."""

from __future__ import annotations

from torch import Tensor, nn


class PatchProjection(nn.Conv3d):
    """A convolution that sees every patch once and whole. Its parameters, and their names, stay what they are."""

    def forward(self, patches: Tensor) -> Tensor:
        """[P, C, t, h, w] patches of exactly the kernel's size -> [P, D, 1, 1, 1]."""
        product = nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return product[:, :, None, None, None]


def project_patches(net: nn.Module) -> None:
    """Turn the patch embeddings of a model's vision tower into products, in place: layers called `patch_embed.proj`
    whose steps are as long as their kernels.
    """
    for name, module in net.named_modules():
        if type(module) is nn.Conv3d and name.endswith("patch_embed.proj") and _sees_each_patch_once(module):
            module.__class__ = PatchProjection


def _sees_each_patch_once(layer: nn.Conv3d) -> bool:
    is_plain = layer.groups == 1 and set(layer.dilation) == {1} and set(layer.padding) == {0}
    return is_plain and layer.stride == layer.kernel_size
