"""Script of one rank in test_reward_model.py: score the same responses under several settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_rank import packs_of, samples
from ranks import end_together

from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision


def main() -> None:
    from vlmrl.learning.deepspeed_engine import init_distributed

    torch.set_num_threads(1)
    init_distributed(120)
    for task in json.loads(Path(sys.argv[1]).read_text()):
        {"score": score, "head": head}[task["do"]](Path(task["out"]), **task["arguments"])
    end_together()


def score(out: Path, *, reward_model: str, base: str, cut: dict[str, Any], stage: int, offload: bool = False) -> None:
    """Save scores and step scores, and the number of parameters that this rank holds between passes."""
    from vlmrl.learning.settings import RewardModelSettings

    model = RewardModelSettings(
        path=reward_model,
        flag="reward.model_name_or_path",
        actor=Model(model_name_or_path=base),
        ds=Ds(zero_stage=stage, param_dtype="fp32"),  # type: ignore[arg-type]
        loop=Loop(timeout_s=120),
        columns=Columns(),
        vision=Vision(),
        offload=offload,
        separator="e",
    ).build()
    packs = packs_of(model, samples(model._processor), **cut)
    arrays = {f"score.{i}": np.array(value) for i, value in model.score(packs)[0]}
    arrays |= {f"steps.{i}": row for i, row in model.step_scores(packs)[0]}
    held = sum(parameter.numel() for parameter in model._value_model.parameters())
    write(out, arrays, held=held)


def head(out: Path, *, base: str, stage: int) -> None:
    """Add a new head to a model that is sharded while it is loaded."""
    import deepspeed

    from vlmrl.learning.deepspeed_engine import sharded_loading
    from vlmrl.models.value_head import value_net

    with sharded_loading(Ds(zero_stage=stage, param_dtype="fp32")):  # type: ignore[arg-type]
        net = value_net(base, dtype=torch.float32, attn_implementation="sdpa", head_seed=4)
    parameters = list(net.parameters())
    held = sum(parameter.numel() for parameter in parameters)
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
        arrays = {name: p.detach().clone().numpy() for name, p in net.named_parameters()}
    write(out, arrays, held=held)


def write(out: Path, arrays: dict[str, np.ndarray], *, held: int) -> None:
    """Write the arrays of all ranks to one file."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (arrays, held))
    if torch.distributed.get_rank() == 0:
        np.savez(out.with_suffix(".npz"), **{name: value for tensors, _ in ranks for name, value in tensors.items()})
        out.with_suffix(".json").write_text(json.dumps([held for _, held in ranks]))


if __name__ == "__main__":
    main()
