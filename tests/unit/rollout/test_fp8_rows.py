"""Engines in FP8: vLLM's layerwise reload quantizes again, and the layers are read back. Its kernels need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import layers_of_vllm
import pytest
import torch
from layers_of_vllm import Worker, weights
from torch import Tensor, nn
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.online import fp8 as vllm_fp8
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

from vlmrl.rollout import fp8_rows
from vlmrl.rollout.reports import find_problem
from vlmrl.rollout.worker_extension import WeightUpdate


class CutlassStandIn:
    """Leaves the weight as vLLM's Cutlass kernel does where sizes are multiples of 16."""

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...


class OtherKernel(CutlassStandIn):
    """A kernel whose format the read-back does not know."""


@pytest.fixture
def quantized() -> Iterator[Worker]:
    """A worker whose linear layers are vLLM's of FP8, with a stand-in for the kernel."""
    create = LinearBase.__init__
    quantization = OnlineQuantizationConfig(resolve_quantization_config("fp8_per_channel", None))
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.quant_config = quantization
        self.quant_method = quantization.get_quant_method(self, "layer")

    with (
        mock.patch.object(LinearBase, "__init__", init),
        mock.patch.object(vllm_fp8, "init_fp8_linear_kernel", side_effect=lambda **_: CutlassStandIn()),
        mock.patch.object(vllm_fp8, "get_current_vllm_config", return_value=config),
        mock.patch.object(vllm_fp8, "expose_input_quant_key", return_value=None),
        mock.patch.object(layers_of_vllm, "_convolution", return_value=None),
        mock.patch.object(layers_of_vllm, "weights", side_effect=lambda **_: _sent()),
    ):
        yield Worker(tied=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_rounded_as_vllm_does(dtype: torch.dtype) -> None:
    rows = (torch.randn(40, 96) * 0.02).to(dtype)
    rows[3] = 0.0
    rows[4, 5] = 60.0
    scale = vllm_fp8._fp8_channel_scale(vllm_fp8.weight_amax(rows, dim=-1, keepdim=True))
    held = vllm_fp8._fp8_quant_per_channel(rows, scale)
    assert torch.equal(fp8_rows.rounded(rows), (held.float() * scale).to(dtype))
    # Three bits: a number is off by at most a sixteenth of itself, unless it is small in its row.
    large = rows.abs() > rows.abs().amax(dim=1, keepdim=True) / 64
    assert bool(((fp8_rows.rounded(rows) - rows).abs()[large] <= rows.abs()[large] / 15).all())


def _sent() -> dict[str, Tensor]:
    return {n: t for n, t in weights(tied=False, dtype=torch.bfloat16).items() if n != "conv1d.weight"}


class Scales(WeightUpdate):
    """Scales a tensor after its digest was computed."""

    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        return super()._load_into_model([(n, t * 1.5 if n == "layers.1.down_proj.weight" else t) for n, t in tensors])


def test_each_reload_quantizes_again_and_every_layer_is_read(quantized: Worker) -> None:
    for seed in range(3):
        report = quantized.sync(_sent(), seed=seed)
        assert find_problem([report]) is None
        assert report["readback"]["unread"] == []
    layer: Any = quantized.model.layers[0]
    assert layer.qkv_proj.weight.dtype == torch.float8_e4m3fn  # type: ignore[index]


def test_a_layer_with_other_numbers_than_were_sent_is_named(quantized: Worker) -> None:
    quantized.sync(_sent(), seed=1)
    report = quantized.sync(_sent(), seed=2, kind=Scales)
    assert str(find_problem([report])).startswith("read back from the layers, layers.1.down_proj.weight ")
    assert find_problem([quantized.sync(_sent(), seed=3)]) is None


def test_layers_of_other_kernels_are_unread_by_name(quantized: Worker) -> None:
    layer: Any = quantized.model.layers[1]
    layer.o_proj.quant_method.fp8_linear = OtherKernel()
    report = quantized.sync(_sent(), seed=1)
    assert report["readback"]["unread"] == ["layers.1.o_proj.weight"]
