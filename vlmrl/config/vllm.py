"""The rollout engines."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from vlmrl.config.base import ConflictError, PositiveFloat, PositiveInt, Section, StepInterval


class Vllm(Section):
    """The rollout engines."""

    num_engines: PositiveInt = 1
    """Number of engines; each holds a copy of the model and serves its own requests (data parallelism)."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share each layer of an engine."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages of an engine, each with a part of the layers on GPUs of its own: an engine has
    `vllm.tensor_parallel_size` times as many GPUs, all of one machine. Has not run on a GPU yet."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of shared prompt prefixes (reset on every weight sync)."""
    max_num_seqs: PositiveInt | None = None
    """Maximum number of responses that an engine decodes together; by default the concurrent requests of the run, up to
    vLLM's default for offline use on that device."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of prefilled and decoded tokens in one engine step; by default enough for all concurrent prompts,
    up to vLLM's default for offline use on that device."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs. Always on without a GPU."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Fraction of GPU memory that an engine may use."""
    cpu_kv_cache_gib: PositiveFloat = 1.0
    """KV cache of an engine that runs on CPU, in GiB."""
    start_timeout_s: PositiveFloat = 600.0
    """Time limit for an engine to start."""
    generate_timeout_s: PositiveFloat = 3600.0
    """Time limit for a batch of responses."""
    max_restarts: int = Field(default=3, ge=0)
    """How often engines that have died are started again, over the whole run. They get the current weights, and what
    was under way is sampled again. The next death saves a checkpoint and stops the run, as does any with
    train.colocate_all on GPUs, where an engine cannot start beside the trainer."""
    sync_backend: Literal["shm", "nccl", "ipc"] = "shm"
    """Transport of weights to the engines: shared memory (shm) is tested on CPU; nccl, between GPUs, and ipc, within a
    GPU (train.colocate_all), need CUDA and have not run on a GPU yet."""
    qlora_base: Literal["dequantized", "original", "bitsandbytes"] = "dequantized"
    """Base weights of the engines when the trainer's are in 4 bits (`ds.load_in_4bit`). `dequantized`: the values of
    the 4-bit weights, so that engines and trainer compute the same function. `original`: the model's own files.
    `bitsandbytes`: 4 bits in the engine too, on CUDA."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: the layers of the language model compute in FP8, with a scale per row of the weights, which are quantized at
    the start and with every weight sync, and per token of the activations. Tower, projector and output layer do not.
    Needs `algo.advantage.is_correction_enable` and a GPU of Ada, Hopper or newer; has not run on a GPU yet."""
    bucket_mib: PositiveFloat | None = None
    """Bucket size of a weight sync in MiB; by default 64 through shared memory, where several buckets are in flight,
    and 512 between GPUs (`vllm.sync_backend`)."""
    readback_steps: StepInterval = 50
    """Steps between full readbacks. After a weight sync one engine layer in eight is read back and compared with what
    was sent, and all of them after the first sync of a process and at this interval; -1 reads none back. Adapters sent
    without the base are always read back completely."""
    max_logprob_diff: PositiveFloat | None = None
    """The run stops when the log-probs of engine and trainer differ by more than this, averaged over the sampled tokens
    of a step; by default 0.001 in fp32, 0.1 in bf16, 0.3 with `vllm.quantization` fp8, and no limit if
    `vllm.qlora_base` is original. Unless this is set, a difference of 20 times the measured noise
    (`verify/noise/level`) also stops the run; if it is set, that only warns. With fp8 noise is not measured."""
    enable_sleep: bool = False
    """Free the engine's GPU memory while other models work; needs `train.colocate_all` and CUDA."""

    def logprob_diff_limit(self, *, param_dtype: str, load_in_4bit: bool) -> float:
        """Return the bound on the mean difference between log-probs of engine and trainer over the sampled tokens.

        Infinity if the settings make them compute differently, and set no bound.
        """
        if self.max_logprob_diff is not None:
            return self.max_logprob_diff
        if load_in_4bit and self.qlora_base == "original":
            return math.inf
        if self.quantization == "fp8":
            return 0.3
        return 1e-3 if param_dtype == "fp32" else 0.1

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of one engine, or cores without a GPU: a worker process on each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def bucket_bytes(self) -> int:
        """Maximum size of a bucket, except for single larger tensors."""
        return int((self.bucket_mib or (64.0 if self.sync_backend == "shm" else 512.0)) * 2**20)

    @model_validator(mode="after")
    def check_batch(self) -> Self:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ConflictError(
                [f"vllm.max_num_batched_tokens {tokens} is below vllm.max_num_seqs {seqs}, each of which takes one"]
            )
        return self
