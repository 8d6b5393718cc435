"""Script of one rank in test_reward_trainer.py: gradients of a reward model's losses, training, and saved models."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_rank import plan, samples
from ranks import end_together

from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.balance import spread
from vlmrl.data.packing import Pack
from vlmrl.learning.settings import RewardModelSettings, RewardTrainerSettings
from vlmrl.types import Floats, Sample

MARGINS = [0.0, 0.5, -0.25, 1.0, 0.0]
CUTS: dict[str, dict[str, Any]] = {
    f"{layout}_{many}": {"layout": layout, "max_samples": most}
    for layout in ("padded", "packed", "shared")
    for many, most in (("one", None), ("many", 2))
}
"""On one rank: a single micro-batch, and one for each pair."""


def trainer(
    model: str, *, stage: int = 0, lora: dict[str, Any] | None = None, four_bit: bool = False, dtype: str = "fp32"
) -> Any:
    # A large epsilon makes Adam's step follow the gradient; with a small one it is its sign, rounding noise included.
    adam = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}
    return RewardTrainerSettings(
        actor=Model.model_validate({"model_name_or_path": model, "adam": adam, "max_norm": 0.5}),
        ds=Ds(zero_stage=stage, param_dtype=dtype, load_in_4bit=four_bit),  # type: ignore[arg-type]
        loop=Loop(timeout_s=120),
        columns=Columns(),
        vision=Vision(cache_gib=1.0),
        total_steps=10,
        adapter=None if lora is None else plan(model, lora, {}),
    ).build()


def packs_of(learner: Any, cut: str) -> list[Pack]:
    """This rank's packs of five pairs; a pair is one group of `learning_rank.samples`."""
    tools = learner._processor
    rows = [replace(sample, response=number // 2) for number, sample in enumerate(samples(tools))]
    shares = spread(
        rows,
        num_ranks=torch.distributed.get_world_size(),
        max_tokens=10_000,
        image_cost=lambda image: float(math.prod(tools.grid(image.size))) if tools.resize_factor else 0.0,
        filler=tools.dummy_sample(),
        whole_responses=True,
        **CUTS[cut],
    )
    return shares[torch.distributed.get_rank()]


def step_labels(rows: list[Sample]) -> dict[int, Floats]:
    """Labels at the last token, and at the second sampled one, of each sample."""
    labels = {}
    for number, sample in enumerate(rows):
        row = np.full(len(sample.tokens), np.nan, dtype=np.float32)
        row[np.flatnonzero(sample.sampled)[1]] = number % 2
        row[-1] = (number + 1) % 3 / 2
        labels[number] = row
    return labels


def gradients(out: Path, *, model: str) -> None:
    """Save value and gradient of both losses for every cut, summed over the ranks."""
    learner = trainer(model)
    # Outside of DeepSpeed's engine, which would accumulate them for a step.
    learner._forward._call = learner._forward._module
    labels = step_labels(samples(learner._processor))
    num_steps = sum(int(np.isfinite(row).sum()) for row in labels.values())
    arrays: dict[str, np.ndarray] = {}
    for cut in CUTS:
        packs = packs_of(learner, cut)
        arrays[f"pairs.{cut}"] = _gradient(learner, [lambda p=p: learner._pair_loss(p, MARGINS) for p in packs])
        arrays[f"steps.{cut}"] = _gradient(
            learner, [lambda p=p: learner._step_loss(p, labels, num_steps) for p in packs]
        )
        arrays |= {f"score.{i}.{cut}": np.array(score) for i, score in learner.scores(packs)[0]}
    _write(out, arrays, {})


def _gradient(learner: Any, losses: list[Any]) -> np.ndarray:
    """[1 + parameters] The loss and its gradient."""
    trainable = [p for p in learner._net.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in trainable]
    value = torch.zeros(1)
    for loss in losses:
        share, _ = loss()
        value += share.detach()
        for held, one in zip(total, torch.autograd.grad(share, trainable, allow_unused=True), strict=True):
            if one is not None:
                held.add_(one)
    flat = torch.cat([value, *(one.flatten() for one in total)])
    torch.distributed.all_reduce(flat)
    return flat.numpy()


def train(out: Path, *, model: str, cut: str, save: str, again: bool = False, **options: Any) -> None:
    """Take two steps, save the model, and score with it and with the model that `rl` and `serve-rm` read back; with
    `again`, compare two further steps with those of a trainer that resumes from a checkpoint."""
    learner = trainer(model, **options)
    packs = packs_of(learner, cut)
    metrics = [learner.fit_pairs(packs, MARGINS) for _ in range(2)]
    own = learner.scores(packs)[0]
    learner.save_model(Path(save), (0.5, 2.0))
    if again:
        checkpoint = out.with_name(f"{out.name}_checkpoint")
        learner.save_checkpoint(checkpoint, {"step": 2})
        learner.fit_pairs(packs, MARGINS)
        expected = learner.scores(packs)[0]
        other = trainer(model, **options)
        assert other.load_checkpoint(checkpoint) == {"step": 2}
        other.fit_pairs(packs, MARGINS)
        assert other.scores(packs)[0] == expected, "a resumed reward model is another"
        assert expected != own
    reader = RewardModelSettings(
        path=save,
        flag="reward.model_name_or_path",
        actor=Model(model_name_or_path=model),
        ds=Ds(zero_stage=0, param_dtype="fp32"),
        loop=Loop(timeout_s=120),
        columns=Columns(),
        vision=Vision(),
        normalize=True,
    ).build()
    arrays = {f"own.{i}": np.array(score) for i, score in own}
    arrays |= {f"read.{i}": np.array(score * 2.0 + 0.5) for i, score in reader.score(packs)[0]}
    _write(out, arrays, {"steps": metrics})


def _write(out: Path, arrays: dict[str, np.ndarray], more: dict[str, Any]) -> None:
    from vlmrl.observe.metrics import reduce

    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (arrays, more))
    if torch.distributed.get_rank() == 0:
        np.savez(out.with_suffix(".npz"), **{name: value for tensors, _ in ranks for name, value in tensors.items()})
        steps = [reduce(list(of_step)) for of_step in zip(*(info.get("steps", []) for _, info in ranks), strict=True)]
        out.with_suffix(".json").write_text(json.dumps(steps))


def main(job: str) -> None:
    torch.set_num_threads(1)
    for task in json.loads(Path(job).read_text()):
        {"gradients": gradients, "train": train}[task["do"]](Path(task["out"]), **task["arguments"])
    end_together()


if __name__ == "__main__":
    main(sys.argv[1])
