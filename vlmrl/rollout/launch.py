"""Starting vLLM so that it serves, or says in one line why not; and stopping it so that nothing is left."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models.adapter_plan import AdapterPlan, check_engine_dtype
from vlmrl.plugins import Processor
from vlmrl.rollout.capacity import CPU, Demand, Limits, choose_limits
from vlmrl.rollout.compatibility import FRONT_END, line, missing
from vlmrl.rollout.console import Console
from vlmrl.rollout.kept_images import KeptImages
from vlmrl.startup.driver import gpu_problem
from vlmrl.system import stops
from vlmrl.system.exits import format_exit, may_be_out_of_memory, oom_kills

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_T = TypeVar("_T")

_STOP_S = 20.0
_BITSANDBYTES = "vllm_bnb_plugin"
_CPU_BLOCK = 32
"""Tokens of a block of the KV cache on CPU: the fewest that vLLM takes there. Answers to one prompt share its whole
blocks and prefill the rest each for itself. With vLLM's own 128, eight prompts of 234 tokens with eight answers each
prefilled 7900 tokens instead of 2400, and a rollout took 2.5 s instead of 1.95 (two cores, 13M model).
"""
_LESS_MEMORY = "where memory is used up, lower --vllm.gpu_memory_utilization, or on CPU --vllm.cpu_kv_cache_gib"
LAST_WORDS_S = 0.5
"""The news that an engine is dead comes before the last lines that it wrote."""


def engine_arguments(
    *,
    vllm: Vllm,
    columns: Columns,
    processor: Processor,
    top_p: float,
    adapter: AdapterPlan | None = None,
    demand: Demand | None = None,
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs that follow from the run's settings, but for the model and its length."""
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enforce_eager": vllm.enforce_eager,
        # By itself vLLM would fall back to pickles.
        "load_format": "safetensors",
        "enable_sleep_mode": vllm.enable_sleep,
        "worker_extension_cls": "vlmrl.rollout.worker_extension.WeightReceiver",
        "logprobs_mode": "processed_logprobs" if top_p == 1.0 else "raw_logprobs",
        # The model's own sampling defaults (a repetition penalty, say) make another distribution than the trainer's.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }
    if processor.resize_factor is not None:
        arguments["limit_mm_per_prompt"] = {"image": columns.max_images_per_prompt, "video": 0}
        arguments["mm_processor_kwargs"] = dict(processor.engine_kwargs)
    if adapter is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": adapter.engine_rank,
            # Else vLLM makes room in embeddings and output layer too, where log-probs of prompts then go wrong.
            "lora_target_modules": list(adapter.suffixes),
        }
    if vllm.qlora_base == "bitsandbytes":
        arguments |= {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    if vllm.sync_backend != "shm":
        arguments["weight_transfer_config"] = {"backend": vllm.sync_backend}
    if current_platform.is_cpu():
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = int(vllm.cpu_kv_cache_gib * 2**30)
        arguments["skip_mm_profiling"] = True
        arguments["block_size"] = _CPU_BLOCK
    else:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    limits = choose_limits(
        demand,
        CPU if current_platform.is_cpu() else _offline_limits(vllm.tensor_parallel_size),
        max_num_seqs=vllm.max_num_seqs,
        max_num_batched_tokens=vllm.max_num_batched_tokens,
    )
    return arguments | limits._asdict()


def _offline_limits(world_size: int) -> Limits:
    """vLLM's own choice for offline work on this device. For an engine that is built as ours is, it would take the
    smallest that it has, whatever the device.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    tokens, seqs = AsyncEngineArgs.get_batch_defaults(world_size)
    return Limits(seqs[UsageContext.LLM_CLASS], tokens[UsageContext.LLM_CLASS])


def check_device(*, adapter: AdapterPlan | None, dtype: str) -> None:
    """Raise ClusterError when torch cannot use the GPU that this engine was given; ConfigError when vLLM cannot apply
    the adapter there. `dtype` is bf16 or fp32.
    """
    problem = gpu_problem(torch.version.cuda, is_available=torch.cuda.is_available())
    if problem is not None:
        raise ClusterError(problem)
    check_engine_dtype(adapter, dtype, has_gpu=torch.cuda.is_available())


def check_base(vllm: Vllm) -> None:
    """Raise ConfigError where vLLM cannot hold the base that was asked for."""
    if vllm.qlora_base != "bitsandbytes":
        return
    if not torch.cuda.is_available():
        raise ConfigError("vllm.qlora_base bitsandbytes needs a CUDA device: take dequantized or original")
    if importlib.util.find_spec(_BITSANDBYTES) is None:
        raise ConfigError(
            "vllm.qlora_base bitsandbytes needs the package vllm-bnb-plugin, for vLLM has no 4-bit layers of its own: "
            "install it, or take dequantized or original"
        )


class Launch:
    """One AsyncLLM, from its start to its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = Console()
        self._children: set[BaseProcess] = set()
        self._is_given_up = False
        self._killed_before = oom_kills()

    async def start(self, arguments: Callable[[], Mapping[str, Any]], *, timeout_s: float) -> AsyncLLM:
        """Start vLLM and wait until it serves. Takes about 10 s on two cores.

        `arguments` returns those of AsyncEngineArgs; called late, because finding out imports vLLM, which takes seconds
        and writes to the console.

        Raises ClusterError when it does not start, for whatever reason, or not within `timeout_s` seconds.
        """
        # A forked engine core would inherit the locks of our threads.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        before = set(multiprocessing.active_children())
        with self._console:
            building = _in_thread(lambda: self._build(arguments))
            done, _ = await asyncio.wait({building}, timeout=timeout_s)
            if not done:
                self._is_given_up = True
                stop = time.monotonic() + _STOP_S
                while not building.done() and time.monotonic() < stop:
                    _kill(set(multiprocessing.active_children()) - before)
                    await asyncio.wait({building}, timeout=0.2)
                building.cancel()
                raise ClusterError(
                    f"rollout engine {self._name} did not start within {timeout_s:g} s; raise vllm.start_timeout_s"
                )
            try:
                llm = building.result()
            except ClusterError as error:  # ours, from before anything was started
                raise ClusterError(f"rollout engine {self._name}: {error}") from None
            except Exception as error:  # vLLM raises many kinds, from a port that is taken to a model it does not know
                _kill(set(multiprocessing.active_children()) - before)
                await asyncio.sleep(LAST_WORDS_S)
                cause = self.because() or f": {type(error).__name__}: {one_line(error)}"
                raise ClusterError(f"rollout engine {self._name} could not start{cause}") from error
        self._children = set(multiprocessing.active_children()) - before
        _quiet()
        return llm

    async def stop(self, llm: AsyncLLM) -> None:
        """Stop vLLM and wait until its processes are gone."""
        if llm.output_handler is not None:
            # It would report the end of the engine core as an accident.
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown, _STOP_S)
        # Its destructor calls it again, at the end of the program perhaps, when half of the modules are gone.
        llm.shutdown = _nothing
        _kill(self._children)
        self._children = set()

    def because(self) -> str:
        """`: <cause>` when vLLM's processes wrote of an error, else nothing."""
        cause = self._console.cause()
        return f": {cause} (VLLM_LOGGING_LEVEL=INFO shows more)" if cause else ""

    def death(self) -> str:
        """How vLLM's process ended, what it wrote last, and what to do."""
        ended = [child for child in self._children if child.exitcode]
        if not ended:
            return f"has died{self.because()}; {_LESS_MEMORY}"
        # The first to go is not known; vLLM terminates the others.
        codes = (child.exitcode for child in ended)
        code = min(codes, key=lambda code: (not may_be_out_of_memory(code), code == -signal.SIGTERM))
        by_kernel = may_be_out_of_memory(code) and oom_kills() > self._killed_before
        line = f"has died, its process {format_exit(code, is_out_of_memory=by_kernel)}{self.because()}"
        return f"{line}; {_LESS_MEMORY}" if may_be_out_of_memory(code) else line

    def _build(self, arguments: Callable[[], Mapping[str, Any]]) -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        stops.block_signals()
        lacks = missing(FRONT_END)
        if lacks:
            raise ClusterError(line(lacks, on_gpu=torch.cuda.is_available()))
        config = AsyncEngineArgs(**arguments()).create_engine_config(UsageContext.ENGINE_CONTEXT)
        if config.device_config.device_type == "cpu":
            # Where the model is not compiled, one function of vLLM's sampler still is: 3 s of every start on two cores,
            # and it wants a C++ compiler.
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
        # Unpickled in the engine core before anything else of ours runs there.
        config.additional_config = KeptImages()
        if config.parallel_config.world_size == 1:
            # On CPU vLLM would put a worker process beside the engine core, to bind threads to cores, which we do not
            # ask for. Without it the start is faster, and the two do not poll shared memory for one another.
            config.parallel_config.distributed_executor_backend = "uni"
        llm = AsyncLLM(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=False,
            log_requests=False,
            usage_context=UsageContext.ENGINE_CONTEXT,
        )
        if self._is_given_up:
            llm.shutdown()
        return llm


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind when it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _in_thread(function: Callable[[], _T]) -> asyncio.Future[_T]:
    """Run a blocking function in a thread of its own, which keeps no program from ending when it never returns."""
    result: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # it belongs to whoever waits
            result.set_exception(error)

    threading.Thread(target=run, name="vlmrl-launch", daemon=True).start()
    return asyncio.wrap_future(result)


def _nothing() -> None:
    """Nothing is left to shut down."""


def _quiet() -> None:
    """vLLM's own part in this process warns of things that are so on purpose."""
    if os.environ.get("VLLM_LOGGING_LEVEL", "WARNING") == "WARNING":
        logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Passing `min_pixels` and `max_pixels`", category=FutureWarning)


def _kill(processes: set[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join(_STOP_S)
