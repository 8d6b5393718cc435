"""The small reward model of `preferences.py` learns from correct and wrong responses, and a run can use it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from preferences import COUNTING, NUM_WRONG, packs, teach, wrong_responses

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
    # Chance is 0.5. In these few steps it learns to prefer numbers from 1 to 9, but not to count.
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
    indexed, _ = reward_model.score([pack])
    scores = [score for _, score in indexed]
    assert len(scores) == 16 * (1 + NUM_WRONG)
    # In units of its scale.
    assert abs(sum(scores) / len(scores)) < 1
    assert 1 < max(scores) - min(scores) < 20


def test_wrong_responses_are_wrong() -> None:
    rng = random.Random(0)
    for label in map(str, range(1, 10)):
        for _ in range(50):
            wrong = wrong_responses(label, rng)
            assert len(wrong) == NUM_WRONG
            assert label not in wrong
