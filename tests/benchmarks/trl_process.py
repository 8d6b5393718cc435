"""TRL's side of compare_trl.py, a separate process: one GRPO step and one JSON line of output per line on stdin.

The setup of TRL, the fastest for this workload on a CPU:

* generation by Transformers, all responses of the step in one batch. Its vLLM mode fails on CPU at the weight sync,
  and its continuous batching refuses models with images;
* `beta` 0, one iteration, one optimizer step per generation: TRL then skips the pass for the old log-probs, which
  equal the new ones, and has no reference model;
* fp32, gradient checkpointing off, no logging or saving, images passed as objects in memory;
* `per_device_train_batch_size` 2: the fastest of 2, 4, 8, 16, 32 and 64 on two cores, where a step took 26, 32, 45, 41,
  43 and 48 s (`--micro-batch` of compare_trl.py).

Its prompts are vlmrl's, token for token, which is checked before the first step. compare_trl.py starts this file, with
TRL's folder and vlmrl's start-up hook on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import datasets
from letters import share_of_letters
from PIL import Image
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.data.source import Source
from vlmrl.types import Prompt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="settings of vlmrl's side")
    parser.add_argument("--question", required=True, help="text of every question of the dataset")
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--micro-batch", required=True, type=int)
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    output = _reserve_stdout()
    config = load(RlConfig, ["--config", arguments.config])
    prompts = draw(config, arguments.steps)
    trainer = Trainer(
        model=config.actor.model_name_or_path,
        reward_funcs=reward,
        args=settings(config, arguments.steps, arguments.micro_batch, arguments.out),
        train_dataset=dataset(prompts, arguments.question),
    )
    check_prompt(trainer, prompts[0], arguments.question)
    trainer.add_callback(Gate(trainer, output, prompt_tokens=len(prompts[0].tokens)))
    trainer.train()


def draw(config: RlConfig, steps: int) -> list[Prompt]:
    """Draw the prompts of vlmrl's run, in the same order."""
    source = Source(
        model=config.actor.model_name_or_path,
        trust_remote_code=False,
        data=config.data,
        evaluation=None,
        seed=config.train.seed,
    )
    return source.draw(config.rollout.batch_size * steps)[0]


def dataset(prompts: list[Prompt], question: str) -> datasets.Dataset:
    """Make one row per prompt, with decoded images in memory."""
    images = [Image.fromarray(prompt.media[0].fetch()) for prompt in prompts]

    def rows(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        messages = [[{"role": "user", "content": question}] for _ in batch["row"]]
        return {"prompt": messages, "image": [images[i] for i in batch["row"]]}

    return datasets.Dataset.from_dict({"row": list(range(len(prompts)))}).with_transform(rows)


def settings(config: RlConfig, steps: int, micro_batch: int, out: Path) -> GRPOConfig:
    num_responses = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_responses // micro_batch,
        num_generations=config.rollout.n_samples_per_prompt,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        beta=0.0,
        loss_type="dapo",
        epsilon=config.actor.eps_clip,
        learning_rate=config.actor.adam.lr,
        adam_beta1=config.actor.adam.betas[0],
        adam_beta2=config.actor.adam.betas[1],
        max_grad_norm=config.actor.max_norm,
        lr_scheduler_type="constant",
        max_steps=steps,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=config.train.seed,
    )


def reward(completions: list[list[dict[str, str]]], **others: Any) -> list[float]:
    return [share_of_letters(completion[0]["content"]) for completion in completions]


def check_prompt(trainer: GRPOTrainer, prompt: Prompt, question: str) -> None:
    image = Image.fromarray(prompt.media[0].fetch())
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    ids, _, _ = trainer._tokenize_prompts([[{"role": "user", "content": content}]])
    if list(ids[0]) != prompt.tokens.tolist():
        raise SystemExit("TRL and vlmrl read the same question as different tokens")


class Trainer(GRPOTrainer):
    """GRPOTrainer that measures generation time."""

    rollout_s = 0.0
    response_tokens = 0

    def _generate(self, prompts: list[Any]) -> Any:
        started = time.perf_counter()
        generated = super()._generate(prompts)
        self.rollout_s += time.perf_counter() - started
        self.response_tokens += sum(len(ids) for ids in generated[1])
        return generated


class Gate(TrainerCallback):
    """Callback that delays each step until a line arrives on stdin, and prints the time of the step."""

    def __init__(self, trainer: Trainer, output: Any, *, prompt_tokens: int) -> None:
        self._trainer = trainer
        self._output = output
        self._prompt_tokens = prompt_tokens
        self._print(is_ready=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not sys.stdin.readline():
            sys.exit()
        self._trainer.rollout_s, self._trainer.response_tokens = 0.0, 0
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        seconds = time.perf_counter() - self._started
        measurements = {
            "seconds": seconds,
            "rollout_s": self._trainer.rollout_s,
            "update_s": seconds - self._trainer.rollout_s,
        }
        measurements["prompt/tokens_mean"] = self._prompt_tokens
        measurements["response/tokens_mean"] = self._trainer.response_tokens / args.generation_batch_size
        self._print(**measurements)

    def _print(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._output, flush=True)


def _reserve_stdout() -> Any:
    """Reserve stdout for JSON lines, and redirect the output of libraries to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


if __name__ == "__main__":
    main()
