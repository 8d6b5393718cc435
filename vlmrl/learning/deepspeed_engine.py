"""DeepSpeed's start and configuration: process group, ZeRO, precision. The only file that knows its settings."""

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
from functools import cache
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
from vlmrl.learning.expert_shares import marked
from vlmrl.learning.optimizers import make_optimizer, make_schedule
from vlmrl.learning.safe_load import use_safe_load
from vlmrl.models.quantize import true_shape
from vlmrl.models.sequence import SequenceGroup
from vlmrl.startup.driver import gpu_problem

# DeepSpeed calls functions that the installed PyTorch has renamed.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
disable_progress_bar()
if not torch.cuda.is_available():
    # DeepSpeed would compile its own collective for CPUs, which needs a compiler, takes half a minute, and leaves
    # segments in /dev/shm behind when a rank is killed. None of its extensions is needed there.
    deepspeed.ops.__compatible_ops__ = dict.fromkeys([*ALL_OPS, "deepspeed_not_implemented"], False)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""`ds.param_dtype` -> dtype of weights and activations."""

_IN_MAIN_MEMORY = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
_MAX_BUCKET_ELEMENTS = 500_000_000
"""Elements. DeepSpeed's default."""


def init_distributed(timeout_s: float) -> None:
    """Join the process group of RANK and WORLD_SIZE through `rendezvous`; without them, be its only rank.

    A collective that waits longer than `timeout_s` seconds raises instead of hanging. Does nothing the second time.
    Raises ClusterError when the port is taken, when other ranks do not join in time, or when torch cannot use the GPU
    that this rank was given.
    """
    if torch.distributed.is_initialized():
        return
    _check_gpu()
    if "WORLD_SIZE" not in os.environ:
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    if torch.cuda.is_available():
        # A worker that was given one GPU sees it as GPU 0, regardless of its rank on the machine.
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
        raise ClusterError(f"{rank} could not join the training ranks at {rendezvous.address()}: {reason}") from None


@cache
def sequence_group(size: int, timeout_s: float) -> SequenceGroup | None:
    """Join the group of `size` consecutive ranks that share the tokens of their passes; None for a size of 1.

    Models in the same process share the group. Call `init_distributed` first; the first call is a collective. `size`
    divides the number of ranks.
    """
    if size == 1:
        return None
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert num_ranks % size == 0, f"{num_ranks} ranks do not divide into groups of {size}"
    groups = [
        torch.distributed.new_group(list(range(first, first + size)), timeout=timedelta(seconds=timeout_s))
        for first in range(0, num_ranks, size)
    ]
    return SequenceGroup(groups[rank // size], rank % size, size)


def device() -> torch.device:
    """Return the device of this rank. Raises ClusterError when torch cannot use the GPU that the rank was given."""
    _check_gpu()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _check_gpu() -> None:
    problem = gpu_problem(torch.version.cuda, is_available=torch.cuda.is_available())
    if problem is not None:
        raise ClusterError(problem)


def seed(number: int, *, deterministic: bool) -> None:
    """Seed every generator of this process, equally on all ranks. `deterministic` selects PyTorch's deterministic
    kernels."""
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - libraries draw from it
    torch.manual_seed(number)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def release_memory() -> None:
    """Free the device memory that PyTorch caches, for processes that share the device. Does nothing on CPU."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def peak_bytes() -> dict[str, int]:
    """Peak memory of this process, in bytes: `host`, and `device` if there is one."""
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peak["device"] = torch.cuda.max_memory_allocated()
    return peak


@contextmanager
def sharded_loading(ds: Ds, *, offload: bool = False) -> Iterator[None]:
    """Make Transformers load models directly into ZeRO-3 shards within the context. Does nothing for other stages.

    With `offload` the shards are in main memory; `start_frozen_engine` leaves existing shards where they are.

    No rank ever holds all weights of a model that is sharded because it does not fit. Models in 4 bits are an
    exception: their weights are quantized in full, and sharded when DeepSpeed starts.
    """
    if ds.zero_stage != 3 or ds.load_in_4bit:
        yield
        return
    zero: dict[str, Any] = {"stage": 3} | ({"offload_param": _IN_MAIN_MEMORY} if offload else {})
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if ds.param_dtype == "bf16":
        config["bf16"] = {"enabled": True}
    # Transformers holds a weak reference to it, so it must be kept alive within the context.
    reference = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        del reference


def start_engine(module: nn.Module, *, actor: Model, ds: Ds, total_steps: int) -> Any:
    """Start a DeepSpeed engine around `module`. Parameters without a gradient get no optimizer state.

    Call `init_distributed` first. `total_steps` is the number of optimizer steps that the schedule spans.
    """
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError("every parameter of the model is frozen, so there is nothing to train: unfreeze a part of it")
    with marked(module):
        engine, _, _, _ = deepspeed.initialize(
            model=module,
            optimizer=make_optimizer(module, actor=actor, where=device()),
            lr_scheduler=lambda inner: make_schedule(inner, actor=actor, total_steps=total_steps),
            config=engine_config(module, actor=actor, ds=ds),
            dist_init_required=False,
        )
    # Checkpoints have files of our own for experts, not DeepSpeed's, one per expert and layer.
    engine.has_moe_layers = False
    use_safe_load(engine)
    return engine


def start_frozen_engine(module: nn.Module, *, ds: Ds, offload: bool) -> Any:
    """Start a DeepSpeed engine that shards the weights of the frozen `module` over the ranks (ZeRO-3).

    With `offload` the shards are in main memory and are copied to the device a layer at a time. Call `init_distributed`
    first.
    """
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": _largest_vector(module)}
    if offload:
        zero["offload_param"] = _IN_MAIN_MEMORY
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


def engine_config(module: nn.Module, *, actor: Model, ds: Ds) -> dict[str, Any]:
    """DeepSpeed's configuration for training `module`.

    Accumulation is 1: the number of packs differs between steps, so the caller marks the last backward pass of a step.
    DeepSpeed clips the gradient unless `uses_plain_optimizer`; then the caller does.
    """
    if ds.adam_offload and ds.zero_stage == 0:
        raise ConfigError("ds.adam_offload needs a sharded optimizer: set ds.zero_stage to 1, 2 or 3")
    if ds.offload != "none" and ds.zero_stage != 3:
        raise ConfigError(f"ds.offload {ds.offload} needs sharded weights: set ds.zero_stage to 3")
    # At stage 0, DeepSpeed sums bf16 gradients in bf16. Stage 1 takes the same steps and sums in fp32.
    stage = 1 if ds.zero_stage == 0 and ds.param_dtype == "bf16" else ds.zero_stage
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": ds.overlap_comm}
    # DeepSpeed allocates its gradient bucket in full: adapters do not need two gigabytes.
    zero["reduce_bucket_size"] = min(_MAX_BUCKET_ELEMENTS, _num_trainable(module))
    if ds.adam_offload:
        zero["offload_optimizer"] = _IN_MAIN_MEMORY
    if ds.offload == "cpu":
        zero["offload_param"] = _IN_MAIN_MEMORY
    if ds.zero_stage == 3:
        # Norms and biases are not sharded: gathering them costs more than it saves. DeepSpeed's default would leave the
        # matrices of small models unsharded too.
        zero["stage3_param_persistence_threshold"] = _largest_vector(module)
    if actor.optim == "muon":
        # Muon needs unsharded gradients.
        zero["reduce_scatter"] = False
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Most stages would clip Muon's step, whose size is constant, instead of its gradient.
        "gradient_clipping": 0.0 if uses_plain_optimizer(ds) or actor.optim == "muon" else actor.max_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # PyTorch's optimizer on every device, so that runs on CPU and GPU take the same steps.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if ds.param_dtype == "bf16":
        config["bf16"] = {"enabled": True}
        # A step may sum hundreds of micro-batches; in bf16 the last ones would be rounded away.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def uses_plain_optimizer(ds: Ds) -> bool:
    """Whether DeepSpeed does not wrap the optimizer, and so reports no gradient norm."""
    return ds.zero_stage == 0 and ds.param_dtype == "fp32"


def _num_trainable(module: nn.Module) -> int:
    return sum(math.prod(true_shape(p)) for p in module.parameters() if p.requires_grad)


def _largest_vector(module: nn.Module) -> int:
    shapes = [true_shape(p) for p in module.parameters()]
    return max((shape[0] for shape in shapes if len(shape) == 1), default=0)
