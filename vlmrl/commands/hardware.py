"""Checks of settings against the devices of the machines, before anything starts."""

from __future__ import annotations

from vlmrl.cluster.session import Session
from vlmrl.config.stages import SamplingConfig
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, check_engine_dtype
from vlmrl.models.engine_kernels import (
    check_engine_images,
    check_engine_kernels,
    check_quantization,
)
from vlmrl.plugins import processor_of


def check_hardware(config: TrainingConfig | EvalConfig, machines: Session, adapter: AdapterPlan | None = None) -> None:
    """Raise ConfigError for settings that need a GPU where there is none, or that vLLM does not support there."""
    has_gpus = machines.has_gpus
    if not has_gpus:
        _check_no_gpu(config)
    generates = isinstance(config, RlConfig | EvalConfig)
    if isinstance(config, RlConfig):
        model = config.actor
        check_quantization(
            model.model_name_or_path,
            config.vllm.quantization,
            has_gpu=has_gpus,
            trust_remote_code=model.trust_remote_code,
        )
    if generates or (isinstance(config, SamplingConfig) and config.generation is not None):
        check_engine_dtype(adapter, config.ds.param_dtype, has_gpu=has_gpus)
        actor = config.actor
        check_engine_kernels(
            actor.model_name_or_path, config.ds.param_dtype, has_gpu=has_gpus, trust_remote_code=actor.trust_remote_code
        )
        if not has_gpus:
            processor = processor_of(actor.model_name_or_path, config.data, trust_remote_code=actor.trust_remote_code)
            check_engine_images(processor, config.data.image_key, has_gpu=False)


def _check_no_gpu(config: TrainingConfig | EvalConfig) -> None:
    """Raise ConfigError for settings that need a GPU."""
    if isinstance(config, RlConfig | EvalConfig | SamplingConfig) and config.vllm.enable_sleep:
        raise ConfigError("vllm.enable_sleep frees GPU memory, and this machine has no GPU: leave it out")
    if isinstance(config, RlConfig) and config.ds.enable_sleep:
        raise ConfigError("ds.enable_sleep frees GPU memory, and this machine has no GPU: leave it out")
    optimizers = {} if isinstance(config, EvalConfig) else {"actor": config.actor.optim}
    if isinstance(config, RlConfig) and config.has_critic:
        optimizers["critic"] = config.critic.optim
    for role, optim in optimizers.items():
        if optim not in ("adam", "muon"):
            raise ConfigError(f"{role}.optim {optim} is from bitsandbytes and needs CUDA: use adam")
