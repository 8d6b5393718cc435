"""The tiny models of the self-test, in the size that this machine's kernels take."""

from __future__ import annotations

from pathlib import Path

import torch

from vlmrl.models import tiny


def build(folder: Path) -> str:
    """A Qwen2.5-VL with random weights, the same every time; its folder.

    Kernels for GPUs want heads of 32 channels in the vision tower too; on CPU the smallest model will do.
    """
    size: tiny.Size = "tiny" if torch.cuda.is_available() else "micro"
    return str(tiny.build("qwen2_5_vl", folder / "model", size=size))
