"""Linear attention on CUDA, by the kernels that Transformers finds there, against fp64 on the CPU."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vlmrl.data.packing import make_pack
from vlmrl.models import tiny
from vlmrl.models.attention import implementation
from vlmrl.models.double_precision import KeepDouble
from vlmrl.models.inputs import model_inputs
from vlmrl.models.linear_attention import reference_functions
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.plugins import processor
from vlmrl.types import Layout, Sample

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MAX_GAP = {torch.float32: 5e-3, torch.bfloat16: 0.1}
"""Relative. Triton multiplies fp32 matrices in TF32."""


def run(folder: Path, layout: Layout, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probs of the sampled tokens, sample after sample, and the gradient of all parameters, end to end."""
    net = load_model(str(folder), dtype=dtype, attn_implementation=implementation("auto", device)).to(device)
    read = processor(str(folder), min_pixels=3136, max_pixels=100_000)
    rng = np.random.default_rng(0)
    samples = []
    # Prompts below and above a chunk of 64 tokens; a response of one token.
    for group, (length, responses) in enumerate([(3, (1, 70)), (150, (5, 64)), (64, (2, 130))]):
        prompt = rng.integers(97, 122, length)
        for more in responses:
            tokens = np.concatenate([prompt, rng.integers(97, 122, more)])
            samples.append(Sample(tokens, np.arange(len(tokens)) >= length, (), group))
    inputs: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in model_inputs(net, read, make_pack(samples, range(6), layout)).items()
    }
    # The kernels of installed packages take no tensors in CPU memory.
    with reference_functions(net) if device == CPU else nullcontext():
        logprobs = Scorer(net)(inputs).logprobs[inputs["scored"]]
        (logprobs * torch.linspace(-1, 1, len(logprobs), device=device)).sum().backward()
    gradients = [parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None]
    return logprobs.detach().cpu().double(), torch.cat(gradients).cpu().double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layouts_are_as_close_to_fp64_as_padded(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny.build("qwen3_5_text", tmp_path / "model")
    with KeepDouble():
        exact = run(folder, "padded", CPU, torch.float64)

    def gaps(layout: Layout) -> list[float]:
        return [
            float((mine - other).norm() / other.norm())
            for mine, other in zip(run(folder, layout, CUDA, dtype), exact, strict=True)
        ]

    padded = gaps("padded")
    assert max(padded) < MAX_GAP[dtype]
    for layout in ("packed", "shared"):
        for gap, of_padded in zip(gaps(layout), padded, strict=True):
            assert gap < 2 * of_padded + 1e-5
