"""Updates of an engine whose workers are stages of a pipeline: each holds a part of the layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from layers_of_vllm import Worker, weights
from torch import Tensor
from vllm.model_executor.models.utils import PPMissingLayer

from vlmrl.rollout.reports import Report, find_problem
from vlmrl.rollout.worker_extension import WeightUpdate

_ELSEWHERE = {0: ("layers.1", "lm_head"), 1: ("tower", "conv1d", "embed_tokens", "layers.0")}
"""Stage -> modules that it lacks."""


class Stage(Worker):
    """A worker that holds the layers of its stage, of two."""

    def __init__(self, stage: int) -> None:
        super().__init__(tied=False, dtype=torch.float32)
        self.stage = stage
        model: Any = self.model
        load = model.load_weights
        for name in _ELSEWHERE[stage]:
            model.set_submodule(name, PPMissingLayer())

        def load_weights(named: Iterable[tuple[str, Tensor]]) -> set[str]:
            """As vLLM's models do (`is_pp_missing_parameter`)."""
            absent = (*(f"{name}." for name in _ELSEWHERE[stage]), "nowhere")
            loaded: set[str] = load([(n, t) for n, t in named if not n.startswith(absent)])
            return loaded

        model.load_weights = load_weights

    def update(self, sent: dict[str, Tensor], *, seed: int, kind: type[WeightUpdate] = WeightUpdate) -> Report:
        make: Any = lambda *arguments: kind(*arguments, stage=self.stage)  # noqa: E731
        return self.sync(sent, seed=seed, kind=make)


class Scales(WeightUpdate):
    """Scales a tensor after its digest was computed."""

    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        return super()._load_into_model([(n, t * 1.01 if n == "layers.1.down_proj.weight" else t) for n, t in tensors])


def _sent() -> dict[str, Tensor]:
    return weights(tied=False, dtype=torch.float32)


def test_together_the_stages_hold_and_read_back_all_that_was_sent() -> None:
    stages = [Stage(0), Stage(1)]
    for seed in range(3):
        sent = _sent()
        reports = [stage.update(sent, seed=seed) for stage in stages]
        assert find_problem(reports) is None
        assert [report["readback"]["unread"] for report in reports] == [[], []]
        assert not {*reports[0]["ignored"]} & {*reports[1]["ignored"]}
        assert {*reports[0]["ignored"], *reports[1]["ignored"]} == sent.keys()


def test_faults_are_found_in_the_stage_that_has_the_layer() -> None:
    stages = [Stage(0), Stage(1)]
    sent = _sent()
    assert find_problem([stage.update(sent, seed=0) for stage in stages]) is None
    for sent, kind, problem in (
        (_sent(), Scales, "read back from the layers of worker 1, layers.1.down_proj.weight is scaled by 1.01"),
        (
            {n: t for n, t in _sent().items() if n != "layers.1.o_proj.weight"},
            WeightUpdate,
            "no weights arrived for layers.1.o_proj (1024 of 1024 elements)",
        ),
        (_sent() | {"nowhere.weight": torch.ones(2)}, WeightUpdate, "vLLM's model has no place for nowhere.weight"),
        (_sent(), WeightUpdate, None),
    ):
        reports = [stage.update(sent, seed=1, kind=kind) for stage in stages]
        found = find_problem(reports)
        assert found is None if problem is None else str(found).startswith(problem), found
