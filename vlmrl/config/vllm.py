"""The rollout engines."""

from typing import Literal, Self

from pydantic import Field, model_validator

from vlmrl.config.base import ConflictError, Every, PositiveFloat, PositiveInt, Section


class Vllm(Section):
    """The rollout engines."""

    num_engines: PositiveInt = 1
    """Engines; each holds a copy of the model."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs of one engine."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of shared prompt prefixes (reset on every publish)."""
    max_num_seqs: PositiveInt | None = None
    """Responses that an engine decodes together; by default as many as the run asks of it at once, up to what vLLM
    takes offline on that device."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one step of an engine, prefilled and decoded; by default enough for all prompts that it has at once, up
    to what vLLM takes offline on that device."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs. Always on where there is no GPU."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of the GPU's memory that an engine may take."""
    cpu_kv_cache_gib: PositiveFloat = 1.0
    """KV cache of an engine that runs on CPU, in GiB."""
    start_timeout_s: PositiveFloat = 600.0
    """An engine that has not started after so many seconds is an error."""
    generate_timeout_s: PositiveFloat = 3600.0
    """A batch of responses that takes longer than this is an error."""
    sync_backend: Literal["shm", "nccl", "ipc"] = "shm"
    """How weights reach the engines: shared memory (shm) is proven on CPU; nccl, between GPUs, and ipc, within a GPU
    (train.colocate_all), need CUDA and have not run on a GPU yet."""
    qlora_base: Literal["dequantized", "original", "bitsandbytes"] = "dequantized"
    """What the engines hold under the adapters when the trainer holds 4 bits (`ds.load_in_4bit`). `dequantized`: the
    4-bit values written out, so that rollouts and training are the same function. `original`: the model's own files.
    `bitsandbytes`: 4 bits in the engine too, on CUDA."""
    bucket_mib: PositiveFloat | None = None
    """Weights are published in messages of this size, in MiB; by default 64 through shared memory, where several are
    under way at a time, and 512 between GPUs (`vllm.sync_backend`)."""
    readback_steps: Every = 50
    """After a publish the engines' layers are read back and compared with what was sent: one layer in eight, and all of
    them with the first publish of a process and every so many steps; -1 means never. Adapters that are published alone
    are always read back whole."""
    max_logprob_diff: PositiveFloat | None = None
    """The run stops when the log-probs of engine and trainer differ by more than this, averaged over the sampled tokens
    of a step; by default 0.001 in fp32, 0.1 in bf16, and no bound where `vllm.qlora_base` is original. Where it is not
    set, 20 times the measured noise (`verify/noise/level`) stops the run too; where it is, that only warns."""
    enable_sleep: bool = False
    """Free the engine's GPU memory while the trainer works; needs `train.colocate_all` and CUDA."""

    @property
    def bucket_bytes(self) -> int:
        """Most bytes of a message, larger tensors apart."""
        return int((self.bucket_mib or (64.0 if self.sync_backend == "shm" else 512.0)) * 2**20)

    @model_validator(mode="after")
    def check_batch(self) -> Self:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ConflictError(
                [f"vllm.max_num_batched_tokens {tokens} is below vllm.max_num_seqs {seqs}, each of which takes one"]
            )
        return self
