"""Starts DeepSpeed: process group, ZeRO, precision. The only file that knows its settings."""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from torch import nn
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils.logging import disable_progress_bar

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.learning import rendezvous
from vlmrl.learning.optimizers import optimizer, schedule
from vlmrl.learning.pickles import guard
from vlmrl.models.quantize import true_shape
from vlmrl.startup.driver import gpu_problem

# Its own code calls what the PyTorch it is installed with has renamed.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
disable_progress_bar()
if not torch.cuda.is_available():
    # It would compile a collective of its own for CPUs, which needs a compiler, takes half a minute, and leaves
    # segments in /dev/shm behind when a rank is killed. None of its extensions is of use to us there.
    deepspeed.ops.__compatible_ops__ = dict.fromkeys([*ALL_OPS, "deepspeed_not_implemented"], False)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""`ds.param_dtype` -> dtype of weights and activations."""

_LARGEST_BUCKET = 500_000_000
"""Numbers. What DeepSpeed takes by itself."""


def init_distributed(timeout_s: float) -> None:
    """Join the process group that RANK and WORLD_SIZE name, where `rendezvous` says; alone when they are not set.

    A collective that waits longer than `timeout_s` seconds raises instead of hanging. Does nothing the second time.
    Raises ClusterError when the port is taken, when the other ranks do not come, or when torch cannot use the GPU that
    this rank was given.
    """
    if torch.distributed.is_initialized():
        return
    _check_gpu()
    if "WORLD_SIZE" not in os.environ:
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    if torch.cuda.is_available():
        # A worker that was given one GPU sees it as the first, whatever its rank on the machine.
        if torch.cuda.device_count() == 1:
            os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        deepspeed.init_distributed(
            dist_backend="nccl" if torch.cuda.is_available() else "gloo",
            auto_mpi_discovery=False,
            init_method=rendezvous.URL,
            verbose=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (torch.distributed.DistError, RuntimeError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
        rank = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
        raise ClusterError(f"{rank} could not join the training ranks at {rendezvous.place()}: {reason}") from None


def device() -> torch.device:
    """Where this rank computes. Raises ClusterError when torch cannot use the GPU that it was given."""
    _check_gpu()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _check_gpu() -> None:
    problem = gpu_problem(torch.version.cuda, is_available=torch.cuda.is_available())
    if problem is not None:
        raise ClusterError(problem)


def seed(number: int, *, deterministic: bool) -> None:
    """Seed every generator of this process, the same on all ranks. `deterministic` asks PyTorch for such kernels."""
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - libraries draw from it
    torch.manual_seed(number)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def release_memory() -> None:
    """Give back what freed tensors have left on the device, for whoever shares it; nothing where there is none."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def peak_bytes() -> dict[str, int]:
    """Most bytes that this process has held: `host`, and `device` where there is one."""
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peak["device"] = torch.cuda.max_memory_allocated()
    return peak


@contextmanager
def sharded_loading(ds: Ds, *, offload: bool = False) -> Iterator[None]:
    """Within the context, Transformers loads models straight into ZeRO-3 shards; nothing for the other stages.

    With `offload` the shards lie in CPU memory; what is sharded once, `start_frozen` leaves where it is.

    So no rank ever holds all weights of a model that is sharded because it does not fit. One in 4 bits is an exception:
    its weights are quantised whole, and are sharded when DeepSpeed starts.
    """
    if ds.zero_stage != 3 or ds.load_in_4bit:
        yield
        return
    zero: dict[str, Any] = {"stage": 3} | (_offloaded() if offload else {})
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if ds.param_dtype == "bf16":
        config["bf16"] = {"enabled": True}
    # Transformers finds it by a weak reference: it counts for as long as this name holds it.
    keeper = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        del keeper


def start(module: nn.Module, *, actor: Model, ds: Ds, total_steps: int) -> Any:
    """A DeepSpeed engine around `module`; its parameters that want no gradient get no optimizer state.

    Call `init_distributed` first. `total_steps` is how many optimizer steps the schedule spans.
    """
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError("every parameter of the model is frozen, so there is nothing to train: thaw a part of it")
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=optimizer(module, actor=actor, where=device()),
        lr_scheduler=lambda inner: schedule(inner, actor=actor, total_steps=total_steps),
        config=settings(module, actor=actor, ds=ds),
        dist_init_required=False,
    )
    guard(engine)
    return engine


def start_frozen(module: nn.Module, *, ds: Ds, offload: bool) -> Any:
    """A DeepSpeed engine that shards the weights of `module`, of which nothing trains, over the ranks (ZeRO-3).

    With `offload` the shards lie in CPU memory and come to the device a layer at a time. Call `init_distributed` first.
    """
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": _largest_vector(module)}
    if offload:
        zero |= _offloaded()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "steps_per_print": None,
    }
    if ds.param_dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
    return engine


def _offloaded() -> dict[str, Any]:
    return {"offload_param": {"device": "cpu", "pin_memory": torch.cuda.is_available()}}


def settings(module: nn.Module, *, actor: Model, ds: Ds) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Accumulation is 1: whoever trains says which backward pass is the last of its step, since steps differ in their
    number of packs. Clipping is DeepSpeed's where it holds the optimizer, and ours for plain fp32 (see `is_plain`).
    """
    if ds.adam_offload and ds.zero_stage == 0:
        raise ConfigError("ds.adam_offload needs a sharded optimizer: set ds.zero_stage to 1, 2 or 3")
    # Without sharding, DeepSpeed sums bf16 gradients in bf16. Stage 1 takes the same steps and sums in fp32.
    stage = 1 if ds.zero_stage == 0 and ds.param_dtype == "bf16" else ds.zero_stage
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": ds.overlap_comm}
    # DeepSpeed allocates the bucket whole, in which it sums gradients: adapters need no two gigabytes.
    zero["reduce_bucket_size"] = min(_LARGEST_BUCKET, _num_trainable(module))
    if ds.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if ds.zero_stage == 3:
        # Norms and biases stay whole on every rank: gathering them costs more than it saves. DeepSpeed's own bound
        # would keep a small model's matrices whole too.
        zero["stage3_param_persistence_threshold"] = _largest_vector(module)
    if actor.optim == "muon":
        # It works on whole gradients.
        zero["reduce_scatter"] = False
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Most stages would clip Muon's step, whose size is always the same, in the place of its gradient.
        "gradient_clipping": 0.0 if is_plain(ds) or actor.optim == "muon" else actor.max_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # The optimizer is PyTorch's on any device, so that a run on CPU and one on a GPU make the same steps.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if ds.param_dtype == "bf16":
        config["bf16"] = {"enabled": True}
        # A step may sum over hundreds of micro-batches, of which bf16 would lose the last ones.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def is_plain(ds: Ds) -> bool:
    """DeepSpeed leaves the optimizer as it is, and reports no gradient norm."""
    return ds.zero_stage == 0 and ds.param_dtype == "fp32"


def _num_trainable(module: nn.Module) -> int:
    return sum(math.prod(true_shape(p)) for p in module.parameters() if p.requires_grad)


def _largest_vector(module: nn.Module) -> int:
    shapes = [true_shape(p) for p in module.parameters()]
    return max((shape[0] for shape in shapes if len(shape) == 1), default=0)
