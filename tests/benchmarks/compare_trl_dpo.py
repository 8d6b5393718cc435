"""A step of DPO against TRL's DPOTrainer, on the same text rows and model, in turn in one process.

    python -m vlmrl.models.tiny --family qwen3 --size small --out model
    python tests/benchmarks/compare_trl_dpo.py model --steps 4

Neither side computes the reference: both have its log-probs before the first step. TRL: fp32, no gradient
checkpointing, the batch in micro-batches of `--micro-batch` pairs. Needs `pip install --no-deps trl==1.16.0`.
"""

# ruff: noqa: E402 - the stack can be imported once it is prepared

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from statistics import median
from typing import Any

from vlmrl import startup

startup.prepare()

import datasets
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

from vlmrl.commands.bench.dpo import TimedLearner
from vlmrl.commands.bench.samples import random_experience
from vlmrl.commands.bench.step import Measurement
from vlmrl.config.bench_verbs import DpoBench
from vlmrl.types import Sample

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Clock(TrainerCallback):
    """Seconds of TRL's steps, between which ours run."""

    def __init__(self, between: Any) -> None:
        self.seconds: list[float] = []
        self.between = between
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.between()
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=128, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one that is discarded")
    parser.add_argument("--micro-batch", type=int, default=8, help="pairs of a pass of TRL")
    given = parser.parse_args()
    rows = texts(given)
    trainer = trl_trainer(given, rows)
    seconds: list[float] = []
    step = our_step(given, samples_of(trainer, given.pairs))
    clock = Clock(lambda: seconds.append(step()))
    trainer.add_callback(clock)
    trainer.train()
    ours, theirs = median(seconds[1:]), median(clock.seconds[1:])
    line = {"vlmrl_s": ours, "trl_s": theirs, "speedup": theirs / ours, "threads": torch.get_num_threads()}
    line |= {"vlmrl_s_each": seconds[1:], "trl_s_each": clock.seconds[1:], **vars(given)}
    print(json.dumps(line), flush=True)


def texts(given: argparse.Namespace) -> list[dict[str, str]]:
    """Random rows, whose characters are tokens of the tiny models."""
    rng = np.random.default_rng(0)

    def text(length: int) -> str:
        return "".join(rng.choice(list(LETTERS), length))

    return [
        {"prompt": text(given.prompt), "chosen": text(given.response - 1), "rejected": text(given.response - 1)}
        for _ in range(given.pairs)
    ]


def trl_trainer(given: argparse.Namespace, rows: list[dict[str, str]]) -> Any:
    return DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(given.model),
        train_dataset=datasets.Dataset.from_list(rows),
        args=DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=given.micro_batch,
            gradient_accumulation_steps=-(-given.pairs // given.micro_batch),
            max_steps=given.steps + 1,
            max_length=None,
            precompute_ref_log_probs=True,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            learning_rate=1e-5,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )


def samples_of(trainer: Any, count: int) -> list[Sample]:
    """TRL's tokens of the rows, as our pairs."""
    samples = []
    for group in range(count):
        row = trainer.train_dataset[group]
        prompt = np.array(row["prompt_ids"], dtype=np.int64)
        for place, side in enumerate(("chosen_ids", "rejected_ids")):
            tokens = np.concatenate([prompt, np.array(row[side], dtype=np.int64)])
            sampled = np.arange(len(tokens)) >= len(prompt)
            samples.append(Sample(tokens, sampled, group=group, response=2 * group + place))
    return samples


def our_step(given: argparse.Namespace, samples: list[Sample]) -> Any:
    """Return a function that makes a step of ours and returns its seconds."""
    config = DpoBench.model_validate(
        {
            "actor": {"model_name_or_path": given.model, "adam": {"lr": 1e-5}},
            "ds": {"param_dtype": "fp32"},
            "bench": {"repeats": given.steps, "layouts": ("shared",)},
        }
    )
    learner = TimedLearner(config)
    measurement = Measurement(learner.pack([replace(sample) for sample in samples], "shared", config))
    old = learner.logprobs_by_sample(measurement.packs)
    experience = random_experience(samples, [old[i] for i in range(len(samples))], seed=0)

    def step() -> float:
        started = time.perf_counter()
        learner.step(measurement, experience)
        return time.perf_counter() - started

    return step


if __name__ == "__main__":
    main()
