r"""Compare an optimizer step of supervised training in vlmrl and in TRL's SFTTrainer, in turn, on the same rows.

    .venv/bin/python tests/benchmarks/compare_trl_sft.py --steps 3

The workload is that of `vlmrl bench sft`: rows of random text with log-normal lengths (mean 300, largest 2,048), of
which the last two thirds are learned, and a 13M Qwen3 with random weights in fp32. Each side is a process; while one
makes a step, the other waits. The first step of each is a warm-up. vlmrl's step packs the rows and updates, as a rank
of `vlmrl sft` does. TRL's has its default layout, padded batches, in fp32 without gradient checkpointing; its rows
are given as tokens. TRL is installed into a folder of its own if it is missing.

Each step is a line of JSON on stdout, the last line has the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from compare_trl import install

from vlmrl import startup
from vlmrl.models import tiny

ROWS_PER_PASS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side, after one that warms up")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/compare_trl_sft"))
    parser.add_argument("--side", choices=("vlmrl", "trl"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    startup.prepare()
    out = arguments.out.absolute()
    if not (out / "model").exists():
        tiny.build("qwen3", out / "model", size="small")
    if arguments.side is not None:
        return _serve(arguments.side, out, rows=arguments.rows, steps=arguments.steps + 2)
    trl = install(out / "environment")
    sides = {side: _start(side, trl, arguments.steps, arguments.rows, out) for side in ("trl", "vlmrl")}
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for step in range(arguments.steps + 1):
        for side in list(sides) if step % 2 else list(reversed(sides)):
            fields = next(sides[side])
            print(json.dumps({"side": side, "step": step, "warm_up": step == 0} | fields), flush=True)
            if step:
                measured[side].append(fields["seconds"])
    medians = {side: round(median(seconds), 3) for side, seconds in measured.items()}
    print(json.dumps({"medians": medians, "speedup": round(medians["trl"] / medians["vlmrl"], 2)}))


def _start(side: str, trl: Path, steps: int, rows: int, out: Path) -> Iterator[dict[str, Any]]:
    """Start the process of one side; yield the measurements of its steps."""
    command = [sys.executable, __file__, "--side", side, "--steps", str(steps), "--rows", str(rows), "--out", str(out)]
    path = os.pathsep.join([str(trl), os.environ["PYTHONPATH"]])
    with (out / f"{side}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
    return _steps(process, out / f"{side}.log")


def _steps(process: subprocess.Popen[str], log: Path) -> Iterator[dict[str, Any]]:
    assert process.stdin is not None
    assert process.stdout is not None
    _read(process, log)  # it is ready
    try:
        while True:
            process.stdin.write("\n")
            process.stdin.flush()
            yield _read(process, log)
    finally:
        process.kill()


def _read(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a side has ended: {log} has its output")
    fields: dict[str, Any] = json.loads(line)
    return fields


def _serve(side: str, out: Path, *, rows: int, steps: int) -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout

    def gate(**fields: Any) -> None:
        print(json.dumps(fields), file=output, flush=True)
        if not sys.stdin.readline():
            sys.exit()

    (_serve_vlmrl if side == "vlmrl" else _serve_trl)(out, rows, steps, gate)


def _workload(out: Path, rows: int) -> tuple[Any, Any]:
    from vlmrl.commands.bench.supervised import chat_samples
    from vlmrl.config.bench_verbs import SftBench
    from vlmrl.config.load import load
    from vlmrl.plugins import processor

    words = f"--actor.model_name_or_path {out / 'model'} --ds.param_dtype fp32 --bench.rows {rows} --bench.repeats 99"
    config = load(SftBench, words.split())
    reader = processor(str(out / "model"), min_pixels=3136, max_pixels=3136)
    return config, chat_samples(reader, len(reader.tokenizer), config.bench, seed=config.train.seed)


def _serve_vlmrl(out: Path, rows: int, steps: int, gate: Any) -> None:
    from vlmrl.commands.bench.supervised import make_policy, pack, step

    config, samples = _workload(out, rows)
    policy, _ = make_policy(config)
    gate(is_ready=True)
    for _ in range(steps):
        started = time.perf_counter()
        step(policy, pack(samples, "packed", config), samples)
        gate(seconds=round(time.perf_counter() - started, 3))


def _serve_trl(out: Path, rows: int, steps: int, gate: Any) -> None:
    import datasets
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    config, samples = _workload(out, rows)

    class Gate(TrainerCallback):  # type: ignore[misc]
        """Delays each step until a line arrives on stdin."""

        started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 0:
                gate(is_ready=True)
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            gate(seconds=round(time.perf_counter() - self.started, 3))

    row = {
        "input_ids": [sample.tokens.tolist() for sample in samples],
        "completion_mask": [sample.sampled.astype(int).tolist() for sample in samples],
    }
    adam = config.actor.adam
    trainer = SFTTrainer(
        model=str(out / "model"),
        args=SFTConfig(
            output_dir=str(out / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=ROWS_PER_PASS,
            gradient_accumulation_steps=rows // ROWS_PER_PASS,
            learning_rate=adam.lr,
            adam_beta1=adam.betas[0],
            adam_beta2=adam.betas[1],
            lr_scheduler_type="constant",
            max_steps=steps,
            max_length=None,
            completion_only_loss=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=datasets.Dataset.from_dict(row),
        callbacks=[Gate()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
