"""The reward model of a few lines: it learns from right and wrong answers, and is one that a run takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from preferences import COUNTING, NUM_WRONG, packs, teach, wrong_answers

from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.learning.settings import RewardModelSettings
from vlmrl.plugins import processor

torch.set_num_threads(1)


def test_some_steps_teach_it_what_answers_look_like(tiny_model: Callable[..., str], tmp_path: Path) -> None:
    base = tiny_model("qwen2_5_vl", size="micro")
    # Chance is a half. It has no time to learn to count, but to tell numbers between 1 and 9 from the rest.
    assert teach(base, tmp_path, steps=40, batch_size=8, lr=2e-3) > 0.58
    reward_model = RewardModelSettings(
        path=str(tmp_path),
        flag="reward.model_name_or_path",
        actor=Model(model_name_or_path=base),
        ds=Ds(param_dtype="fp32", zero_stage=0),
        loop=Loop(),
        columns=Columns(max_pixels=100_000),
        vision=Vision(),
        normalize=True,
    ).build()
    reader = processor(base, min_pixels=3136, max_pixels=100_000)
    (pack,) = packs(reader, COUNTING, "test", 16, 1, seed=1)
    found, _ = reward_model.score([pack])
    scores = [score for _, score in found]
    assert len(scores) == 16 * (1 + NUM_WRONG)
    # In units of its own scale.
    assert abs(sum(scores) / len(scores)) < 1
    assert 1 < max(scores) - min(scores) < 20


def test_wrong_answers_are_wrong() -> None:
    rng = random.Random(0)
    for label in map(str, range(1, 10)):
        for _ in range(50):
            found = wrong_answers(label, rng)
            assert len(found) == NUM_WRONG
            assert label not in found
