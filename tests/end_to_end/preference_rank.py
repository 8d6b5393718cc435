"""Script of one rank in test_preference_ranks.py: optimizer steps on preferences."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_rank import plan, samples, weights
from ranks import end_together
from safetensors.torch import save_file

from vlmrl.algorithms.preference_loss import Offsets, PreferenceLoss
from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.balance import spread
from vlmrl.data.preference_step import PreferenceStep, chosen_tokens, kept_together, summed
from vlmrl.types import Sample


def policy(model: str, *, stage: int = 0, lora: dict[str, Any] | None = None, four_bit: bool = False) -> Any:
    from vlmrl.learning.settings import PolicySettings

    # A large epsilon makes Adam's step follow the gradient; with a small one it is its sign, rounding noise included.
    return PolicySettings(
        actor=Model.model_validate({"model_name_or_path": model, "adam": {"lr": 0.01, "eps": 1e-3}}),
        ds=Ds(zero_stage=stage, param_dtype="fp32", load_in_4bit=four_bit),  # type: ignore[arg-type]
        loop=Loop(timeout_s=120),
        columns=Columns(),
        vision=Vision(),
        total_steps=10,
        loss=None,
        temperature=1.0,
        bans=False,
        adapter=None if lora is None else plan(model, lora, {}),
    ).build()


def pairs(tools: Any) -> list[Sample]:
    """Five pairs, with no image, one and two; the responses of the last one have images of their own."""
    rows = [replace(sample, num_prompt_images=len(sample.media)) for sample in samples(tools)]
    alone = {"shares_prompt": False, "num_prompt_images": None}
    rows[-2] = replace(rows[-2], **alone)
    # The image of the second pair is as large in tokens only where it has the same shape: swap whole samples.
    rows[-1] = replace(rows[3], group=rows[-1].group, **alone)
    return [replace(sample, response=number) for number, sample in enumerate(rows)]


def prefer(
    out: Path, *, model: str, layout: str, max_tokens: int, loss: dict[str, Any], steps: int = 2, **settings: Any
) -> None:
    """Take two optimizer steps; write weights and metrics to `out`."""
    from vlmrl.observe.metrics import reduce

    learner = policy(model, **settings)
    tools, world = learner._processor, torch.distributed.get_world_size()
    rows = pairs(tools)
    preference = PreferenceLoss(**({"beta": 0.3} | loss))
    rng = np.random.default_rng(1)
    # Near the log-probs of random weights, where no sigmoid is flat.
    lengths = np.array([sample.sampled.sum() for sample in rows])
    reference = -5.5 * lengths + rng.normal(size=len(rows))
    is_judged = preference.kind == "kto"
    step = PreferenceStep(
        settings=preference,
        reference=reference,
        desirable=rng.random(len(rows)) < 0.5 if is_judged else None,
        offsets=Offsets(delta=0.2, baseline=0.5),
        num_chosen_tokens=chosen_tokens(rows),
    )
    shares = spread(
        rows if is_judged else kept_together(rows),
        num_ranks=world,
        layout=layout,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        max_samples=None,
        image_cost=lambda image: float(math.prod(tools.grid(image.size))),
        filler=tools.dummy_sample(),
        whole_responses=True,
    )
    packs = shares[torch.distributed.get_rank()]
    metrics = [learner.fit_preferences(packs, step) for _ in range(steps)]
    by_rank: list[Any] = [None] * world
    torch.distributed.all_gather_object(by_rank, metrics)
    tensors = weights(learner)
    if torch.distributed.get_rank() == 0:
        np.savez(out.with_suffix(".npz"), **tensors)
        numbers = [reduce([of_rank[i] for of_rank in by_rank]) for i in range(steps)]
        out.with_suffix(".json").write_text(json.dumps(numbers))


def four_bits(out: Path, *, model: str, max_tokens: int) -> None:
    """Train adapters on a 4-bit base against that base; then again from a checkpoint, and on its numbers in fp32."""
    from vlmrl.learning.weights import saved_tensors, whole_tensors
    from vlmrl.models.quantize import is_four_bit
    from vlmrl.models.weight_buckets import digest
    from vlmrl.observe.metrics import reduce

    learner = policy(model, lora={}, four_bit=True)
    tools = learner._processor
    rows = pairs(tools)

    def packs(samples: list[Sample]) -> list[Any]:
        cost = {"image_cost": lambda image: float(math.prod(tools.grid(image.size))), "filler": tools.dummy_sample()}
        limits = {"max_tokens": max_tokens, "max_samples": None, "whole_responses": True}
        return spread(samples, num_ranks=1, layout="shared", **limits, **cost)[0]  # type: ignore[arg-type]

    def reference(learner: Any) -> Any:
        by_id = dict(learner.logprobs(packs(rows), adapter=False)[0])
        return summed(rows, [by_id[number] for number in range(len(rows))])

    def step(learner: Any) -> dict[str, float]:
        preference = PreferenceStep(
            settings=PreferenceLoss(kind="dpo", beta=0.3),
            reference=reference(learner),
            desirable=None,
            offsets=Offsets(),
            num_chosen_tokens=chosen_tokens(rows),
        )
        return reduce([learner.fit_preferences(packs(kept_together(rows)), preference)])

    def bits() -> dict[str, str]:
        return {name: digest(name, held) for name, held in saved_tensors(learner._net) if is_four_bit(held)}

    before, base = bits(), reference(learner)
    frozen = {name for name, held in learner._net.named_parameters() if not held.requires_grad}
    first = step(learner)
    learner.save_checkpoint(out.with_name("four_bit_checkpoint"), {})
    second = step(learner)
    changed = [name for name, value in bits().items() if value != before[name]]

    plain = out.with_name("four_bit_as_numbers")
    shutil.copytree(model, plain)
    save_file(
        {
            name: held.clone()
            for name, held in whole_tensors(learner._net, saved_tensors(learner._net), max_bytes=2**30)
        },
        plain / "model.safetensors",
        metadata={"format": "pt"},
    )
    as_numbers = policy(str(plain), lora={})
    resumed = policy(model, lora={}, four_bit=True)
    resumed.load_checkpoint(out.with_name("four_bit_checkpoint"))
    result = {
        "bits": len(before),
        "changed": changed,
        "trained_base": [name for name in learner_names(learner) if ".lora_" not in name],
        "frozen_adapters": [name for name in frozen if ".lora_" in name],
        "moved_reference": float(np.abs(reference(learner) - base).max()),
        "steps": [first, second],
        "as_numbers": [step(as_numbers), step(as_numbers)],
        "resumed": step(resumed),
    }
    out.with_suffix(".json").write_text(json.dumps(result))


def learner_names(learner: Any) -> list[str]:
    """Names of the parameters that train."""
    return [name for name, held in learner._net.named_parameters() if held.requires_grad]


def main() -> None:
    torch.set_num_threads(1)
    for task in json.loads(Path(sys.argv[1]).read_text()):
        {"prefer": prefer, "four_bits": four_bits}[task["do"]](Path(task["out"]), **task["arguments"])
    end_together()


if __name__ == "__main__":
    main()
