"""Models for which vLLM lacks kernels: refused by name, before an engine starts that would die at the first request."""

from __future__ import annotations

from vlmrl.errors import ConfigError
from vlmrl.models.kind import EXPERT_COUNTS, read_config
from vlmrl.plugins import MODEL_FLAG, Processor

_LINEAR_ATTENTION = "linear_attention"
"""Layer type of the gated delta rule, in Transformers' configurations."""
_CPU_CHANNELS = (64, 128)
"""Channels of a head, of keys and values alike, that vLLM's kernel for CPUs takes."""


def check_engine_kernels(
    path: str, dtype: str, *, has_gpu: bool, trust_remote_code: bool = False, flag: str = MODEL_FLAG
) -> None:
    """Raise ConfigError when vLLM has no kernel for the linear attention of the model `path`.

    `dtype` is `ds.param_dtype`, and `flag` the setting that names the model.
    """
    config = read_config(path, trust_remote_code=trust_remote_code, flag=flag).get_text_config()
    if _LINEAR_ATTENTION not in (getattr(config, "layer_types", None) or ()):
        return
    if dtype == "fp32":
        raise ConfigError(
            f"ds.param_dtype fp32 with {path}: vLLM computes linear attention ({config.model_type}) in bf16 only: set "
            "ds.param_dtype bf16"
        )
    keys, values = (getattr(config, f"linear_{name}_head_dim", None) for name in ("key", "value"))
    if not has_gpu and (keys != values or keys not in _CPU_CHANNELS):
        sizes = " or ".join(map(str, _CPU_CHANNELS))
        raise ConfigError(
            f"{flag}: heads of the linear attention of {path} have {keys} channels in keys and {values} in values, and "
            f"on CPU vLLM needs {sizes} in both: use another model, or a GPU"
        )


def check_quantization(
    path: str, quantization: str, *, has_gpu: bool, trust_remote_code: bool = False, flag: str = MODEL_FLAG
) -> None:
    """Raise ConfigError when vLLM cannot hold the model `path` as `vllm.quantization` says.

    `flag` is the setting that names the model.
    """
    if quantization == "none":
        return
    if not has_gpu:
        raise ConfigError(
            f"vllm.quantization {quantization} needs CUDA: vLLM has no such kernel for CPUs: leave it out"
        )
    config = read_config(path, trust_remote_code=trust_remote_code, flag=flag).get_text_config()
    if any(getattr(config, name, None) for name in EXPERT_COUNTS):
        raise ConfigError(
            f"vllm.quantization {quantization} with {path}: quantized experts cannot be read back after a weight sync: "
            "leave it out"
        )


def check_engine_images(processor: Processor, image_key: str | None, *, has_gpu: bool) -> None:
    """Raise ConfigError when vLLM would read the model's images with another attention than the trainer.

    `image_key` is `data.image_key`; None: the run reads no images.
    """
    if processor.attends_both_ways and image_key is not None and not has_gpu:
        raise ConfigError(
            "tokens of an image attend to each other in this model, but vLLM's attention on CPUs is causal over "
            "images: run it on GPUs, or without images (data.image_key none)"
        )
