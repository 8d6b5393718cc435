"""DeepSpeed on CUDA over NCCL: the policy learns, and its log-probs in bf16 agree with fp32.

The rank is a process that runs this file as a script, because a process group cannot be replaced.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def rank(model: str, dtype: str, sleeps: str = "") -> dict[str, Any]:
    """Score and learn eight samples on a single rank; return its measurements."""
    import torch

    from vlmrl.config.actor import Model
    from vlmrl.config.data import Columns
    from vlmrl.config.ds import Ds
    from vlmrl.config.train import Loop
    from vlmrl.config.vision import Vision
    from vlmrl.data.packing import make_packs
    from vlmrl.learning.settings import PolicySettings
    from vlmrl.types import Sample, Totals

    learner = PolicySettings(
        actor=Model.model_validate({"model_name_or_path": model, "adam": {"lr": 1e-3}}),
        ds=Ds.model_validate({"zero_stage": 2, "param_dtype": dtype, "enable_sleep": bool(sleeps)}),
        loop=Loop(),
        columns=Columns(),
        vision=Vision(),
        total_steps=10,
        loss=None,
        temperature=1.0,
        bans=False,
    ).build()
    rng = np.random.default_rng(0)
    prompts = rng.integers(97, 122, (4, 4))
    samples = [
        Sample(
            tokens=np.concatenate([prompts[i // 2], rng.integers(97, 122, length - 4)]),
            sampled=np.arange(length) >= 4,
            group=i // 2,
        )
        for i, length in enumerate([9, 40, 17, 64, 12, 33, 8, 21])
    ]
    packs = make_packs(
        samples,
        list(range(len(samples))),
        layout="shared",
        max_tokens=100,
        max_samples=None,
        image_cost=lambda image: 0.0,
    )
    totals = Totals(num_tokens=sum(int(s.sampled.sum()) for s in samples), num_responses=len(samples))
    learner.release()
    asleep = torch.cuda.memory_allocated()
    scored = dict(learner.logprobs(packs)[0])
    for _ in range(5):
        learner.fit(packs, totals)
    learnt = dict(learner.logprobs(packs)[0])
    return {
        "backend": torch.distributed.get_backend(),
        "logprobs": [scored[i].tolist() for i in range(len(samples))],
        "learnt": [learnt[i].tolist() for i in range(len(samples))],
        "asleep": asleep,
        "gain": float(np.mean([learnt[i].sum() - scored[i].sum() for i in range(len(samples))])),
    }


@pytest.mark.timeout(600)
def test_the_policy_learns_over_nccl_and_bf16_agrees_with_fp32(tmp_path: Path) -> None:
    from vlmrl.models import tiny

    model = tiny.build("qwen3", tmp_path / "model")
    results = {}
    for port, arguments in enumerate((["fp32"], ["bf16"], ["bf16", "sleeps"]), start=29611):
        environment = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        done = subprocess.run(
            [sys.executable, __file__, str(model), *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results[" ".join(arguments)] = json.loads(done.stdout.strip().splitlines()[-1])
    for dtype in results:
        assert results[dtype]["backend"] == "nccl"
        assert results[dtype]["gain"] > 0
    for exact, rough in zip(results["fp32"]["logprobs"], results["bf16"]["logprobs"], strict=True):
        np.testing.assert_allclose(rough, exact, atol=0.1)
    # An optimizer that sleeps between steps makes the same updates, and frees its memory meanwhile.
    for slept, stayed in zip(results["bf16 sleeps"]["learnt"], results["bf16"]["learnt"], strict=True):
        np.testing.assert_allclose(slept, stayed, atol=0.02)
    assert results["bf16 sleeps"]["asleep"] < 0.5 * results["bf16"]["asleep"]


if __name__ == "__main__":
    print(json.dumps(rank(*sys.argv[1:])))
