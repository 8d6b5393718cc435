"""Models for which vLLM has no kernel are refused by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from vlmrl.errors import ConfigError
from vlmrl.models.engine_kernels import (
    check_engine_images,
    check_engine_kernels,
    check_quantization,
)


def hybrid(folder: Path, **channels: int) -> str:
    Qwen3_5TextConfig(**channels).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("channels", [64, 128])
def test_heads_that_the_kernel_for_cpus_takes_pass(tmp_path: Path, channels: int) -> None:
    model = hybrid(tmp_path, linear_key_head_dim=channels, linear_value_head_dim=channels)
    check_engine_kernels(model, "bf16", has_gpu=False)


@pytest.mark.parametrize(("keys", "values"), [(32, 32), (256, 256), (64, 128)])
def test_other_heads_are_refused_on_cpu_and_pass_on_a_gpu(tmp_path: Path, keys: int, values: int) -> None:
    model = hybrid(tmp_path, linear_key_head_dim=keys, linear_value_head_dim=values)
    with pytest.raises(ConfigError, match=rf"have {keys} channels in keys and {values} in values.*64 or 128") as caught:
        check_engine_kernels(model, "bf16", has_gpu=False)
    assert "\n" not in str(caught.value)
    check_engine_kernels(model, "bf16", has_gpu=True)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_fp32_is_refused_for_hybrid_models_only(tmp_path: Path, has_gpu: bool) -> None:
    with pytest.raises(ConfigError, match=r"^ds\.param_dtype fp32 with .*: set ds\.param_dtype bf16$"):
        check_engine_kernels(hybrid(tmp_path / "hybrid"), "fp32", has_gpu=has_gpu)
    Qwen3Config().save_pretrained(tmp_path / "plain")
    check_engine_kernels(str(tmp_path / "plain"), "fp32", has_gpu=has_gpu)


def test_fp8_is_refused_on_cpu_and_with_experts(tmp_path: Path) -> None:
    Qwen3Config().save_pretrained(tmp_path / "plain")
    Qwen3MoeConfig().save_pretrained(tmp_path / "experts")
    check_quantization(str(tmp_path / "experts"), "none", has_gpu=False)
    check_quantization(str(tmp_path / "plain"), "fp8", has_gpu=True)
    with pytest.raises(ConfigError, match=r"^vllm\.quantization fp8 needs CUDA: .* leave it out$"):
        check_quantization(str(tmp_path / "plain"), "fp8", has_gpu=False)
    with pytest.raises(ConfigError, match="quantized experts cannot be read back"):
        check_quantization(str(tmp_path / "experts"), "fp8", has_gpu=True)


def test_images_that_attend_both_ways_are_refused_on_a_cpu() -> None:
    processor: Any = SimpleNamespace(attends_both_ways=True)
    with pytest.raises(ConfigError, match=r"attention on CPUs is causal over images: .* \(data\.image_key none\)$"):
        check_engine_images(processor, "images", has_gpu=False)
    check_engine_images(processor, None, has_gpu=False)
    check_engine_images(processor, "images", has_gpu=True)
    processor.attends_both_ways = False
    check_engine_images(processor, "images", has_gpu=False)
