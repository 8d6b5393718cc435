"""The tiny model of the self-test, in a size that this machine's kernels support."""

from __future__ import annotations

from pathlib import Path

import torch

from vlmrl.models import tiny


def build(folder: Path) -> str:
    """Build a Qwen2.5-VL with random weights, equal every time; return its folder.

    GPU kernels need heads of 32 channels, in the vision tower too; on CPU the smallest model works.
    """
    size: tiny.Size = "tiny" if torch.cuda.is_available() else "micro"
    return str(tiny.build("qwen2_5_vl", folder / "model", size=size))
