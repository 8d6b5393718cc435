"""The checks of the self-test by process, each with the settings that avoid what it checks."""

from __future__ import annotations

from vlmrl.commands.self_test.outcome import Check, Theme

_HERE = "vlmrl.commands.self_test"

KERNELS = Theme(
    "kernels",
    (
        Check("driver and collectives", f"{_HERE}.ranks:check", "NCCL_P2P_DISABLE=1, or one GPU", limit_s=150),
        Check("packed attention", f"{_HERE}.attention:check", "--train.layout padded --ds.attn_implementation sdpa"),
        Check("ZeRO stages 0, 2 and 3", f"{_HERE}.stages:check", "--ds.zero_stage 2", limit_s=180),
        Check("4-bit layers", f"{_HERE}.layers:nf4", "--ds.load_in_4bit false"),
        Check("8-bit Adam", f"{_HERE}.layers:eight_bit_adam", "--actor.optim adam", needs_gpu=True),
        Check("Liger's layers", f"{_HERE}.layers:liger", "--ds.use_liger_kernel false", needs_gpu=True),
    ),
)
TRAINING = Theme(
    "training",
    (Check("two GRPO steps with images", f"{_HERE}.training:check", "see the run's own message", limit_s=400),),
)
SERVING = Theme(
    "serving",
    (
        Check("engine: generate and score", f"{_HERE}.serving:generates", "--vllm.enforce_eager", limit_s=120),
        Check("weight sync through memory", f"{_HERE}.serving:syncs_by_memory", "--vllm.num_engines 1"),
        Check(
            "weight sync within a GPU (ipc)",
            f"{_HERE}.serving:syncs_by_device",
            "--vllm.sync_backend shm",
            needs_gpu=True,
        ),
        Check("sleep and wake", f"{_HERE}.serving:sleeps", "--vllm.enable_sleep false", needs_gpu=True),
        Check("adapters in a mixed batch", f"{_HERE}.serving:adapts", "--ds.lora.rank 0"),
        Check("adapter check", f"{_HERE}.serving:checks_adapters", "--ds.lora.rank 0", limit_s=120),
    ),
    setup=f"{_HERE}.serving:shared",
    limit_s=300,
    avoid="--vllm.enforce_eager where it is the engine that does not start",
)
APART = Theme(
    "apart",
    (
        Check(
            "weight sync between GPUs (nccl)",
            f"{_HERE}.serving:syncs_by_device",
            "--vllm.sync_backend shm",
            needs_gpu=True,
        ),
    ),
    setup=f"{_HERE}.serving:apart",
    limit_s=300,
    avoid="--vllm.sync_backend shm",
)
ENGINES = Theme(
    "engines",
    (
        Check("engine in FP8", f"{_HERE}.engines:fp8", "--vllm.quantization none", needs_gpu=True, limit_s=180),
        Check(
            "engine in two stages",
            f"{_HERE}.engines:pipeline",
            "--vllm.pipeline_parallel_size 1",
            needs_gpu=True,
            limit_s=180,
        ),
    ),
)
THEMES = (KERNELS, SERVING, TRAINING, APART, ENGINES)
