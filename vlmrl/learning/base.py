"""What every model that learns has: an engine around it, backward passes that add up to a step, checkpoints, sleep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.packing import Pack, place
from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.learning.checkpoint import Adapted, load_state, save_state
from vlmrl.learning.checksums import damage
from vlmrl.learning.deepspeed_engine import (
    device,
    init_distributed,
    is_plain,
    peak_bytes,
    release_memory,
    seed,
    sharded_loading,
    start,
)
from vlmrl.learning.ema import Ema
from vlmrl.learning.forward import Passes, Passing
from vlmrl.learning.optimizers import move_schedule
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.adapters import Base, base_fingerprint, check_base, inject, read_adapter, set_tensors
from vlmrl.models.buffers import check_buffers
from vlmrl.models.load import freeze, trainable_table
from vlmrl.observe.metrics import Mean, Metric
from vlmrl.plugins import Processor

Share = tuple[Tensor, dict[str, Tensor]]
"""One pack's share of a step's loss, and sums over its sampled tokens by name."""

_SLEEPING = (OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states)
"""What nothing but an optimizer step reads: the weights in fp32, and the moments."""


class Learner:
    """One per rank. Whoever is one reads its model in here, calls `_begin`, and says what a loss is and what it tells.

    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which rank this is; without them it is alone.
    """

    _area: ClassVar[str]
    """Of its metrics."""
    _section: ClassVar[str]
    """Of its settings."""
    _forward: Passes
    _engine: Any

    def __init__(
        self,
        read: Callable[[torch.device], tuple[PreTrainedModel, Processor]],
        *,
        model: Model,
        ds: Ds,
        loop: Loop,
        adapter: AdapterPlan | None,
    ) -> None:
        """`read` makes the model for a device. With an `adapter` it alone trains."""
        init_distributed(loop.timeout_s)
        seed(loop.seed, deterministic=loop.full_determinism_enable)
        self._model, self._ds, self._device = model, ds, device()
        self._world_size = torch.distributed.get_world_size()
        self._average: Ema | None = None
        with sharded_loading(ds):
            self._net, self._processor = read(self._device)
            freeze(self._net, self._processor, vision=model.freeze_visual_encoder, projector=model.freeze_projector)
            self._adapted = None if adapter is None else _adapt(self._net, adapter, model, ds)

    def _begin(self, module: nn.Module, *, total_steps: int, vision: Vision) -> Passing:
        """Start the engine around `module`, which wraps the model; how passes go through it from now on.

        `total_steps` is the number of optimizer steps of the whole run. Raises VlmrlError when the model computes with
        other buffers than its code makes.
        """
        self._table = trainable_table(self._net, self._processor)
        self._total_steps = total_steps
        if self._model.gradient_checkpointing_enable:
            self._checkpoint_activations(reentrant=self._model.gradient_checkpointing_reentrant)
        self._engine = start(module.train(), actor=self._model, ds=self._ds, total_steps=total_steps)
        check_buffers(self._net)
        self._put_to_sleep()
        return {
            "device": self._device,
            "cache_bytes": int(vision.cache_gib * 2**30),
            "call": self._engine,
            "ranks_move_together": self._ds.zero_stage == 3 and self._world_size > 1,
        }

    def table(self) -> list[Any]:
        """(part of the model, trainable parameters, all parameters)."""
        return self._table

    def memory(self) -> dict[str, int]:
        """Most bytes that this rank has held: `host`, and `device` where there is one."""
        return peak_bytes()

    def release(self) -> None:
        """Give back the memory that passes have left on the device, for the engines that share it."""
        release_memory()

    @contextmanager
    def _optimizer_awake(self) -> Iterator[None]:
        """Within the context the optimizer's state is on the device, which with `ds.enable_sleep` it is not otherwise.

        Weights stay there: passes and weight syncs need them. On CPU nothing happens.
        """
        if self._sleeps:
            self._engine.reload_states()
        yield
        self._put_to_sleep()

    def _put_to_sleep(self) -> None:
        if self._sleeps:
            self._engine.offload_states(include=_SLEEPING)

    def _save_state(self, folder: Path, extra: dict[str, Any]) -> None:
        with self._optimizer_awake():
            save_state(
                self._engine,
                self._net,
                Path(folder),
                ds=self._ds,
                optim=self._optim,
                extra=extra,
                adapted=self._adapted,
                average=self._average,
            )

    def _load_state(self, folder: Path) -> dict[str, Any]:
        self._forward.forget()
        with self._optimizer_awake():
            return load_state(
                self._engine,
                self._net,
                Path(folder),
                ds=self._ds,
                optim=self._optim,
                adapted=self._adapted,
                average=self._average,
            )

    def follow(self, share: float) -> None:
        """Go on at the learning rate of a run that is so far, from 0 to 1: its steps may be others than those that the
        checkpoint has counted."""
        self._follow((share, share))

    def checkpoint_damage(self, folder: Path) -> list[str]:
        """What this rank finds wrong with its files of a checkpoint, `name: why` each. No collective; the ranks
        together verify every file once."""
        rank = torch.distributed.get_rank()
        return damage(Path(folder), rank=rank, num_ranks=self._world_size)

    @property
    def _optim(self) -> dict[str, str]:
        return {f"{self._section}.optim": self._model.optim}

    def _measure(self, found: dict[str, float], pack: Pack) -> dict[str, Metric]:
        """What a pack tells: `found` has the sums of its `Share`, and its `share` of the loss."""
        raise NotImplementedError

    def _backward(self, loss: Share, pack: Pack, *, is_last: bool) -> dict[str, Metric]:
        """The backward pass of one pack, and what it tells. One transfer from the device, before the pass.

        Raises VlmrlError when the loss is not a number.
        """
        share, sums = loss
        numbers = torch.stack([share.detach().double(), *(value.double() for value in sums.values())]).tolist()
        found = dict(zip(["share", *sums], numbers, strict=True))
        if not math.isfinite(found["share"]):
            raise VlmrlError(f"the loss of optimizer step {self._number} is {found['share']}: {self._hint}")
        # DeepSpeed averages gradients over ranks, but the shares of the ranks add up to the loss.
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(share * self._world_size)
        # Shares add up over packs and ranks. The mean is over ranks and steps: the step counts, its packs do not.
        return {f"{self._area}/loss": Mean(found["share"] * self._world_size, 0.0), **self._measure(found, pack)}

    def _follow(self, span: tuple[float, float] | None) -> None:
        """Set the learning rate of the step in the making by how far the run is, from 0 to 1, where that is known."""
        if span is not None:
            move_schedule(self._engine.lr_scheduler, span[0] * self._total_steps)

    def _step(self) -> dict[str, Metric]:
        """Raises VlmrlError when the gradient is not a number."""
        number, rate = self._number, float(self._engine.get_lr()[0])
        if is_plain(self._ds):
            norm = self._clipped_norm()
            if math.isfinite(norm):
                self._engine.step()
        else:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
        # ZeRO reports a norm that is not a number as -1.
        if not math.isfinite(norm) or norm < 0:
            raise VlmrlError(f"the gradient of optimizer step {number} is not finite: {self._hint}")
        if self._average is not None:
            self._average.update()
        return {
            f"{self._area}/loss": Mean(0.0, 1.0),
            f"{self._area}/grad_norm": Mean(norm),
            f"{self._area}/lr": Mean(rate),
            **self._forward.take_counts(),
        }

    def _sum_over_ranks(self, numbers: Sequence[float]) -> list[float]:
        """A collective. Every rank gets the same sums, to the last bit."""
        total = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(total)
        found: list[float] = total.tolist()
        return found

    def _placed(self, pack: Pack, columns: Sequence[Any], *, fill: float | bool | int) -> Tensor:
        return place(pack, columns, fill).to(self._device, non_blocking=True)

    def _clipped_norm(self) -> float:
        """The norm before clipping."""
        trainable = [p for p in self._net.parameters() if p.requires_grad]
        # As in `engine.settings`: Muon's steps are not clipped.
        bound = math.inf if self._model.optim == "muon" else self._model.max_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(trainable, bound))

    @property
    def _sleeps(self) -> bool:
        return self._ds.enable_sleep and self._device.type == "cuda"

    def _checkpoint_activations(self, *, reentrant: bool) -> None:
        self._net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            # Its backward starts from the inputs, which must want a gradient even below frozen layers.
            self._net.enable_input_require_grads()

    @property
    def _number(self) -> int:
        """Of the optimizer step in the making, from 1."""
        return int(self._engine.global_steps) + 1

    @property
    def _hint(self) -> str:
        return f"lower --{self._section}.adam.lr, or look for what is odd in the data of that step"


def _adapt(net: PreTrainedModel, plan: AdapterPlan, model: Model, ds: Ds) -> Adapted:
    """Put the adapter in, as new or as it was left."""
    if plan.has_magnitude and ds.load_in_4bit and ds.zero_stage == 3:
        # In each pass PEFT puts a new parameter in the place of the one that it dequantised, on CPU.
        raise ConfigError("ds.lora.use_dora on a base in 4 bits cannot be sharded: set ds.zero_stage to 0, 1 or 2")
    path = model.model_name_or_path
    inject(net, plan)
    if model.adapter_name_or_path is not None:
        flag, folder = "actor.adapter_name_or_path", model.adapter_name_or_path
        stored = read_adapter(folder, flag=flag)
        check_base(stored, path, folder=folder, flag=flag)
        if stored.base.fingerprint is not None and stored.base.is_four_bit != ds.load_in_4bit:
            was = str(stored.base.is_four_bit).lower()
            raise ConfigError(f"{flag}: {folder} was trained with ds.load_in_4bit {was}: set it so here too")
        set_tensors(net, plan, stored, folder=folder)
    return Adapted(plan, Base(path=path, fingerprint=base_fingerprint(path), is_four_bit=ds.load_in_4bit))
