"""Start vLLM, report in one line why it did not start or how it died, and stop it with all its processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import spawn
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.plugins import Processor
from vlmrl.rollout.capacity import CPU_LIMITS, Demand, Limits, choose_limits, video_demand
from vlmrl.rollout.compatibility import FRONT_END, format_missing, missing
from vlmrl.rollout.vllm_patches import KeepImages
from vlmrl.system import fork_server, stops
from vlmrl.system.exits import format_exit, may_be_out_of_memory, oom_kills

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


_T = TypeVar("_T")

_STOP_S = 20.0
_CPU_BLOCK = 32
"""Tokens of a block of the KV cache on CPU: the smallest that vLLM allows there. The responses to a prompt share its
full blocks, and each prefills the rest. With vLLM's default of 128, eight prompts of 234 tokens with eight responses
each prefilled 7900 tokens instead of 2400, and a rollout took 2.5 s instead of 1.95 (two cores, 13M model).
"""
_IN_FULL = ("*visual*", "*vision*", "*projector*", "*connector*", "*merger*")
"""Names of layers in vLLM's models that `vllm.quantization` leaves as they are, as patterns."""
_LESS_MEMORY = "if memory has run out, lower --vllm.gpu_memory_utilization, or on CPU --vllm.cpu_kv_cache_gib"
OUTPUT_DELAY_S = 0.5
"""The last lines of a dead engine arrive after the error that reports its death: how long to wait for them."""
_PROCESS_PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) ?)+")
_LOG_PREFIX = re.compile(r"^(ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?")
_EXCEPTION = re.compile(r"^(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .")
_CONSEQUENCE = re.compile(
    r"Engine ?[Cc]ore .*(failed|encountered)|WorkerProc initialization failed|cannot schedule new futures"
)
_CAPTURED_LINES = 1000
_NO_VIDEOS = Columns()


def engine_arguments(
    *,
    vllm: Vllm,
    max_images: int,
    processor: Processor,
    top_p: float,
    adapter: AdapterPlan | None = None,
    returns_experts: bool = False,
    demand: Demand | None = None,
    columns: Columns = _NO_VIDEOS,
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs that follow from the run's settings, except model, dtype and length."""
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "pipeline_parallel_size": vllm.pipeline_parallel_size,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enforce_eager": vllm.enforce_eager,
        # vLLM's default falls back to pickles.
        "load_format": "safetensors",
        "enable_sleep_mode": vllm.enable_sleep,
        "worker_extension_cls": "vlmrl.rollout.worker_extension.WeightReceiver",
        "logprobs_mode": "processed_logprobs" if top_p == 1.0 else "raw_logprobs",
        # The model's own sampling defaults (e.g. a repetition penalty) would change the distribution.
        "generation_config": "vllm",
        "disable_log_stats": True,
        # Log-probs that the trainer waits for go before responses that wait to begin.
        "scheduling_policy": "priority",
        "seed": 0,
    }
    videos = video_demand(columns, processor)
    if processor.resize_factor is not None:
        arguments["limit_mm_per_prompt"] = {"image": max_images, "video": videos.number}
        arguments["mm_processor_kwargs"] = dict(processor.engine_kwargs)
    if adapter is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": adapter.engine_rank,
            # Otherwise vLLM adds adapters to embeddings and output layer too, which makes log-probs of prompts wrong.
            "lora_target_modules": list(adapter.suffixes),
        }
    if returns_experts and not current_platform.is_cpu():
        arguments["enable_return_routed_experts"] = True
    if vllm.qlora_base == "bitsandbytes":
        arguments |= {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
    if vllm.quantization == "fp8":
        # vLLM's own fp8 is for files in FP8. Sizes of towers are no multiples of the kernels' tiles.
        arguments |= {"quantization": "fp8_per_channel", "quantization_config": {"ignore": list(_IN_FULL)}}
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
        CPU_LIMITS if current_platform.is_cpu() else _offline_limits(vllm.gpus_per_engine),
        max_num_seqs=vllm.max_num_seqs,
        max_num_batched_tokens=vllm.max_num_batched_tokens,
        video_tokens=videos.tokens,
    )
    return arguments | limits._asdict()


def _offline_limits(world_size: int) -> Limits:
    """vLLM's defaults for offline inference on this device.

    An engine that is built like this one would get vLLM's smallest defaults on any device.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    tokens, seqs = AsyncEngineArgs.get_batch_defaults(world_size)
    return Limits(seqs[UsageContext.LLM_CLASS], tokens[UsageContext.LLM_CLASS])


class Launch:
    """One AsyncLLM, from start to stop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = Console()
        self._children: set[BaseProcess] = set()
        self._is_abandoned = False
        self._killed_before = oom_kills()

    async def start(self, arguments: Callable[[], Mapping[str, Any]], *, timeout_s: float) -> AsyncLLM:
        """Start vLLM and wait until it accepts requests. Takes about 10 s on two cores.

        Args:
            arguments: returns the arguments of AsyncEngineArgs. It is called late, because it imports vLLM, which takes
                seconds and writes to the console.

        Raises:
            ClusterError: vLLM does not start, or not within `timeout_s` seconds.
        """
        # A forked engine core would inherit the locks of our threads.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        before = set(multiprocessing.active_children())
        with self._console, _forks():
            building = _in_thread(lambda: self._build(arguments))
            done, _ = await asyncio.wait({building}, timeout=timeout_s)
            if not done:
                self._is_abandoned = True
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
            except ClusterError as error:  # our own, raised before anything started
                raise ClusterError(f"rollout engine {self._name}: {error}") from None
            except Exception as error:  # vLLM raises many kinds, from a port in use to an unknown model
                _kill(set(multiprocessing.active_children()) - before)
                await asyncio.sleep(OUTPUT_DELAY_S)
                cause = self._format_cause() or f": {type(error).__name__}: {one_line(error)}"
                raise ClusterError(f"rollout engine {self._name} could not start{cause}") from error
        self._children = set(multiprocessing.active_children()) - before
        _silence_warnings()
        return llm

    async def stop(self, llm: AsyncLLM) -> None:
        """Stop vLLM and wait until its processes have ended."""
        if llm.output_handler is not None:
            # Otherwise it reports the end of the engine core as a failure.
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown, _STOP_S)
        # The destructor calls it again, perhaps at the interpreter's exit, when half of the modules are unloaded.
        llm.shutdown = _do_nothing
        _kill(self._children)
        self._children = set()

    def _format_cause(self) -> str:
        """`: <cause>` when vLLM's processes logged an error, else empty."""
        cause = self._console.cause()
        return f": {cause} (VLLM_LOGGING_LEVEL=INFO shows more)" if cause else ""

    def death(self) -> str:
        """Return one line: how vLLM's process ended, the error that it logged, and what to do."""
        dead = [child for child in self._children if child.exitcode]
        if not dead:
            return f"has died{self._format_cause()}; {_LESS_MEMORY}"
        # Which one died first is not known; vLLM terminates the others.
        codes = (child.exitcode for child in dead)
        code = min(codes, key=lambda code: (not may_be_out_of_memory(code), code == -signal.SIGTERM))
        by_kernel = may_be_out_of_memory(code) and oom_kills() > self._killed_before
        line = f"has died, its process {format_exit(code, is_out_of_memory=by_kernel)}{self._format_cause()}"
        return f"{line}; {_LESS_MEMORY}" if may_be_out_of_memory(code) else line

    def _build(self, arguments: Callable[[], Mapping[str, Any]]) -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        stops.block_signals()
        absent = missing(FRONT_END)
        if absent:
            raise ClusterError(format_missing(absent, on_gpu=torch.cuda.is_available()))
        config = AsyncEngineArgs(**arguments()).create_engine_config(UsageContext.ENGINE_CONTEXT)
        if config.device_config.device_type == "cpu":
            # Even with an uncompiled model one function of vLLM's sampler is compiled: 3 s of every start on two cores,
            # and it needs a C++ compiler.
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
        # Unpickled in the engine core before any of our other code runs there.
        config.additional_config = KeepImages()
        if config.parallel_config.world_size == 1:
            # On CPU vLLM would start a worker process in addition to the engine core, to bind threads to cores, which
            # we do not use. Without it the start is faster, and the two do not poll shared memory for each other.
            config.parallel_config.distributed_executor_backend = "uni"
        llm = AsyncLLM(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=False,
            log_requests=False,
            usage_context=UsageContext.ENGINE_CONTEXT,
        )
        if self._is_abandoned:
            llm.shutdown()
        return llm


class Console:
    """Context that captures stdout and stderr of this process, and of the children that start in it.

    A child is captured for its whole life, so that the reason is known when it dies. With VLLM_LOGGING_LEVEL at INFO or
    DEBUG nothing is captured.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_CAPTURED_LINES)
        self._saved: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        if os.environ.get("VLLM_LOGGING_LEVEL", "WARNING") not in ("WARNING", "ERROR", "CRITICAL"):
            return self
        _flush()
        reader, writer = os.pipe()
        self._saved = os.dup(1), os.dup(2)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        threading.Thread(target=self._read, args=(reader,), name="vlmrl-console", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saved is None:
            return
        _flush()
        for descriptor, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)
        self._saved = None

    def cause(self) -> str | None:
        """Return the last exception in the output that is not merely the consequence of another; None without one."""
        return find_cause(list(self._lines))

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))


def find_cause(lines: list[str]) -> str | None:
    """Return the last line, without vLLM's prefixes, that ends a traceback and is not merely the consequence of
    another."""
    for line in reversed(lines):
        bare = _LOG_PREFIX.sub("", _PROCESS_PREFIX.sub("", line))
        if _EXCEPTION.match(bare) and not _CONSEQUENCE.search(bare):
            return bare.strip()
    return None


@contextmanager
def _forks() -> Iterator[None]:
    """Let multiprocessing start its processes as forks of the fork server, if the run has one."""
    python = spawn.get_executable()
    multiprocessing.set_executable(os.environ.get(fork_server.VARIABLE) or python)
    try:
        yield
    finally:
        multiprocessing.set_executable(python)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class when it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _in_thread(function: Callable[[], _T]) -> asyncio.Future[_T]:
    """Run a blocking function in a daemon thread: if it never returns, the program can still exit."""
    result: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # the caller gets it from the future
            result.set_exception(error)

    threading.Thread(target=run, name="vlmrl-launch", daemon=True).start()
    return asyncio.wrap_future(result)


def _do_nothing() -> None:
    """Replace `shutdown` of an engine that has been shut down."""


def _silence_warnings() -> None:
    """Silence vLLM's front end in this process, which warns of settings that we make on purpose."""
    if os.environ.get("VLLM_LOGGING_LEVEL", "WARNING") == "WARNING":
        logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Passing `min_pixels` and `max_pixels`", category=FutureWarning)


def _kill(processes: set[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join(_STOP_S)
