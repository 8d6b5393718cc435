"""Checks of an engine's device, model and settings, in its process, before vLLM is started."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, check_engine_dtype
from vlmrl.models.engine_kernels import (
    check_engine_images,
    check_engine_kernels,
    check_quantization,
)
from vlmrl.plugins import Processor
from vlmrl.startup.driver import gpu_problem

if TYPE_CHECKING:
    from vlmrl.rollout.settings import EngineSettings

_BITSANDBYTES = "vllm_bnb_plugin"


def check_device(*, adapter: AdapterPlan | None, dtype: str) -> None:
    """Check that torch can use this engine's GPU, and that vLLM can apply the adapter there.

    Args:
        dtype: bf16 or fp32.

    Raises:
        ClusterError: torch cannot use the GPU.
        ConfigError: vLLM cannot apply the adapter in this dtype.
    """
    problem = gpu_problem(torch.version.cuda, is_available=torch.cuda.is_available())
    if problem is not None:
        raise ClusterError(problem)
    check_engine_dtype(adapter, dtype, has_gpu=torch.cuda.is_available())


def check_model(settings: EngineSettings, processor: Callable[[], Processor]) -> None:
    """Raise ConfigError when vLLM cannot hold the model as `vllm.qlora_base` says, or lacks a kernel for it here."""
    check_base(settings.vllm)
    check_quantization(
        settings.model,
        settings.vllm.quantization,
        has_gpu=torch.cuda.is_available(),
        trust_remote_code=settings.trust_remote_code,
    )
    check_engine_kernels(
        settings.model,
        settings.dtype,
        has_gpu=torch.cuda.is_available(),
        trust_remote_code=settings.trust_remote_code,
    )
    check_engine_images(processor(), settings.columns.image_key, has_gpu=torch.cuda.is_available())


def check_base(vllm: Vllm) -> None:
    """Raise ConfigError when vLLM cannot hold the base model as `vllm.qlora_base` says."""
    if vllm.qlora_base != "bitsandbytes":
        return
    if not torch.cuda.is_available():
        raise ConfigError("vllm.qlora_base bitsandbytes needs a CUDA device: use dequantized or original")
    if importlib.util.find_spec(_BITSANDBYTES) is None:
        raise ConfigError(
            "vllm.qlora_base bitsandbytes needs the package vllm-bnb-plugin, because vLLM has no 4-bit layers of its "
            "own: install it, or use dequantized or original"
        )
