"""The frozen teacher of off-policy distillation, in the student's process: hidden states and output layer."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import Tensor

from vlmrl.data.packing import Pack
from vlmrl.learning.deepspeed_engine import sharded_loading, start_frozen_engine
from vlmrl.learning.forward import ModelForward, read_model
from vlmrl.learning.settings import InnerTeacherSettings, PolicySettings
from vlmrl.models.buffers import check_buffers
from vlmrl.models.divergence import TeacherRows
from vlmrl.models.scorer import Backbone, ImageFeatures, linear_head
from vlmrl.observe.metrics import Metric
from vlmrl.plugins import Processor, check_same_inputs

FLAG = "sft.teacher_model_name_or_path"


class _States(Backbone):
    """The wrapper whose forward pass ends before the output layer."""

    def forward(self, inputs: dict[str, Any], *, features: dict[str, ImageFeatures] | None = None) -> Tensor:
        """The states [n, D] that predict the n scored tokens."""
        states, _ = self.states(inputs, features=features)
        return states


class InnerTeacher:
    """The teacher, one per rank of the student. Under ZeRO-3 its layers are sharded like the student's, and `rows` is a
    collective; each rank has a copy of its output layer, which the chunked divergence reads twice."""

    def __init__(
        self, settings: InnerTeacherSettings, student: PolicySettings, *, processor: Processor, where: torch.device
    ) -> None:
        """`processor` is the student's. Raises ConfigError when the teacher's tokens or image processing differ."""
        actor, path, is_sharded = student.actor, settings.path, student.ds.zero_stage == 3
        # Never in 4 bits: the student would learn the errors of the quantization.
        ds = student.ds.model_copy(update={"load_in_4bit": False})
        with sharded_loading(ds):
            model = actor.model_copy(update={"model_name_or_path": path})
            net, own = read_model(model, ds=ds, columns=student.columns, where=where)
        check_same_inputs(own, processor, what=f"{FLAG}: {path}", actor=actor.model_name_or_path)
        net.requires_grad_(False)
        head = linear_head(net)
        module = _States(net).eval()
        if not is_sharded:
            module.to(where)
        # The weight, and the bias if there is one.
        parameters = [_whole(p) if is_sharded else p.detach() for p in head.parameters()]
        self._weight, self._bias = parameters[0], parameters[1] if len(parameters) > 1 else None
        self._settings = settings
        self._forward = ModelForward(
            module,
            own,
            device=where,
            cache_bytes=int(student.vision.cache_gib * 2**30),
            call=start_frozen_engine(module, ds=ds, offload=False) if is_sharded else module,
            ranks_in_lockstep=is_sharded and torch.distributed.get_world_size() > 1,
        )
        check_buffers(net)

    @property
    def coef(self) -> float:
        """Weight of the divergence; the rest of 1 is that of the negative log-likelihood."""
        return self._settings.coef

    def rows(self, pack: Pack) -> TeacherRows:
        """The teacher's states before the pack's sampled tokens, and its output layer."""
        with torch.no_grad():
            states: Tensor = self._forward.run(pack)
        return TeacherRows(states, self._weight, self._bias, self._settings.direction)

    def take_counts(self) -> dict[str, Metric]:
        """As `ModelForward.take_counts`."""
        return self._forward.take_counts()


def _whole(parameter: Tensor) -> Tensor:
    """Return a copy of a sharded parameter."""
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()
