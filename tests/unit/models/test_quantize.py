"""4-bit layers: which are quantized, equal outputs in every mode, exact dequantization."""

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from vlmrl.config.ds import Ds
from vlmrl.models.load import load_model, skeleton
from vlmrl.models.quantize import dequantized, four_bit, is_four_bit, quantized_layers, true_dtype, true_shape

Make = Callable[..., Any]

NF4 = torch.tensor(
    [
        *(-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0),
        *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1),
    ]
)
"""The 16 levels (arXiv:2305.14314, appendix E)."""


@pytest.fixture
def read(folder: Make, reader: Make) -> Make:
    """`read(family, tied=..., dtype=..., **ds)`: a micro model with its language model in 4 bits."""

    def make(family: str, *, tied: bool = False, dtype: str = "fp32", **ds: Any) -> PreTrainedModel:
        settings = Ds(load_in_4bit=True, param_dtype=dtype, **ds)  # type: ignore[arg-type]
        return load_model(
            str(folder(family, tied=tied)),
            dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
            attn_implementation="sdpa",
            four_bit=four_bit(settings, reader(family)),
        )

    return make


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_text", "qwen3", "llama"])
def test_only_linear_layers_of_the_language_model_are_quantized(read: Make, net: Make, family: str) -> None:
    quantized = {name for name, p in read(family).named_parameters() if is_four_bit(p)}
    # Two layers with q, k, v, o and three matrices of the MLP; the names of towers hold "visual". In a hybrid model the
    # first has four inputs and an output of linear attention instead.
    linear = {f"{name}.weight" for name, module in net(family).named_modules() if type(module) is nn.Linear}
    assert quantized == {name for name in linear if "visual" not in name and name != "lm_head.weight"}
    assert len(quantized) == (15 if family.startswith("qwen3_5") else 14)


def test_heads_of_any_name_are_never_quantized(folder: Make, reader: Make) -> None:
    model = skeleton(str(folder("qwen3")))
    model.score = nn.Linear(64, 1, device="meta")
    names = quantized_layers(model, reader("qwen3").parameter_group)
    assert len(names) == 14
    assert not {"lm_head", "score"} & set(names)


def test_tied_embeddings_stay_unquantized_and_tied(read: Make) -> None:
    model = read("qwen3_vl", tied=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not is_four_bit(model.lm_head.weight)


@pytest.mark.parametrize(
    ("ds", "storage"),
    [
        ({"zero_stage": 0}, torch.uint8),
        ({"zero_stage": 2, "dtype": "bf16"}, torch.uint8),
        ({"zero_stage": 3}, torch.float32),
        ({"zero_stage": 3, "dtype": "bf16"}, torch.bfloat16),
        ({"zero_stage": 2, "quant_storage": "fp32"}, torch.float32),
    ],
)
def test_the_storage_dtype_depends_on_the_zero_stage(read: Make, ds: dict[str, Any], storage: torch.dtype) -> None:
    model = read("qwen3", **ds)
    layer = model.model.layers[0].mlp.up_proj.weight
    # Up maps 64 to 96, two values per byte.
    assert layer.dtype == storage
    assert layer.numel() * layer.element_size() == 64 * 96 // 2
    assert true_shape(layer) == (96, 64)
    assert true_dtype(layer) == dequantized(layer).dtype == model.dtype


def test_without_the_setting_there_are_no_4_bit_options(reader: Make) -> None:
    assert four_bit(Ds(), reader("qwen3")) is None


def test_dequantized_values_are_nf4_levels_times_the_maximum_of_their_block(read: Make, net: Make) -> None:
    stored = net("qwen3")  # has other weights, but the same shapes
    model = read("qwen3")
    numbers = dequantized(model.model.layers[1].self_attn.q_proj.weight)
    assert numbers.shape == stored.model.layers[1].self_attn.q_proj.weight.shape == (64, 64)
    blocks = numbers.view(-1, 64)
    scaled = blocks / blocks.abs().amax(dim=1, keepdim=True)
    distance = (scaled[..., None] - NF4).abs().amin(dim=-1)
    assert float(distance.max()) < 1e-3


def test_other_tensors_are_returned_unchanged() -> None:
    plain = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    assert not is_four_bit(plain)
    assert dequantized(plain).data_ptr() == plain.data_ptr()
    assert (true_shape(plain), true_dtype(plain)) == ((2, 3), torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_every_kind_of_pass_equals_that_of_the_dequantized_weights(read: Make, family: str) -> None:
    layer = next(module for name, module in read(family).named_modules() if name.endswith("layers.0.self_attn.q_proj"))
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    wanted = F.linear(x, dequantized(layer.weight), layer.bias)
    for training in (True, False, True):
        for gradient in (True, False):
            layer.train(training)
            with torch.set_grad_enabled(gradient):
                got = layer(x.clone().requires_grad_(gradient))
            assert torch.equal(got, wanted), (training, gradient)


def test_without_preparation_a_pass_breaks_the_weights(read: Make) -> None:
    from bitsandbytes.functional import has_avx512bf16

    if not has_avx512bf16():
        pytest.skip("this CPU has no AVX512-BF16, for which bitsandbytes repacks weights")
    layer = read("qwen3").model.layers[0].self_attn.q_proj.eval()
    layer.support_avx512bf16_for_cpu = True
    before = layer.weight.data.clone()
    with torch.no_grad():
        layer(torch.ones(1, 64))
    assert not torch.equal(before, layer.weight.data)


def test_a_model_in_4_bits_is_saved_dequantized(read: Make, tmp_path: Any) -> None:
    model = read("qwen3")
    numbers = {name: dequantized(p).clone() for name, p in model.named_parameters()}
    model.save_pretrained(tmp_path, state_dict=numbers)
    again = load_model(str(tmp_path), dtype=torch.float32, attn_implementation="sdpa")
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-6)


def test_bitsandbytes_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    code = "import vlmrl.models.quantize, bitsandbytes"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "gemm_4bit_forward" not in done.stdout + done.stderr
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
