"""Folders of runs as `vlmrl rl` writes them, made without a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlmrl.report.server import LivePage, Server, make_server

SETTINGS = """\
# Written by vlmrl: vlmrl rl --config config.yaml repeats the run
actor:
  adam:
    lr: 0.0001
  model_name_or_path: tiny
  # dual_clip: null  # not read: an example
data:
  prompt_dataset: toy
reward:
  functions: {exact: 1.0}
  remote_url: null
rollout:
  n_samples_per_prompt: 8
train:
  seed: 42
"""


def make_run(
    folder: Path,
    *,
    steps: int = 4,
    prompts: int = 2,
    responses: int = 2,
    text: str = "the answer is {}",
    images: int = 0,
    settings: str = SETTINGS,
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Write settings, metrics and transcripts of a run of `steps` steps, with evaluations before and after it.

    Response r of prompt p is `text` with p + r, and right (reward 1) when r is even. In the first evaluation every
    response is wrong, in the last every one is right. Prompts have the first of `images` images, by number.
    """
    (folder / "rollouts" / "media").mkdir(parents=True)
    (folder / "config.yaml").write_text(settings)
    names = [image_name(number) for number in range(images)]
    for number, name in enumerate(names):
        save_image(folder / "rollouts" / "media" / f"{name}.png", seed=number)
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(steps + 1):
            record: dict[str, Any] = {"step": step, **(metrics or {})}
            if step:
                record |= {"reward/mean": step / steps, "time/step_s": 2.0, "time/rollout_s": 1.5}
            if step in (0, steps):
                record |= {"eval/toy/pass@1": 0.75 if step else 0.25}
            lines.write(json.dumps(record) + "\n")
    for step in range(1, steps + 1):
        groups = [group(step, p, responses=responses, text=text, images=names[p : p + 1]) for p in range(prompts)]
        write_lines(folder / "rollouts" / f"step_{step:06d}.jsonl", groups)
    for step, score in ((0, 0.0), (steps, 1.0)):
        groups = [evaluated(step, p, score=score, text=text, images=names[p : p + 1]) for p in range(prompts)]
        write_lines(folder / "rollouts" / f"eval_toy_step_{step:06d}.jsonl", groups)
    return folder


def group(step: int, number: int, *, responses: int, text: str, images: Sequence[str] = ()) -> dict[str, Any]:
    """A line of a training step."""
    return {
        "step": step,
        "index": number,
        "source": f"toy:{number}",
        "prompt": f"<|im_start|>user\nquestion {number}<|im_end|>\n<|im_start|>assistant\n",
        "label": str(number),
        "images": list(images),
        "metadata": {"family": "toy"},
        "left_out": False,
        "responses": [
            {
                "text": text.format(number + r),
                "score": float(r % 2 == 0),
                "parts": {"exact": float(r % 2 == 0)},
                "failure": None,
                "problem": None,
                "reward": float(r % 2 == 0),
                "advantage": 1.0 - 2 * (r % 2),
                "tokens": 3 + r,
                "finish_reason": "stop",
                "version": step - 1,
            }
            for r in range(responses)
        ],
    }


def evaluated(step: int, number: int, *, score: float, text: str, images: Sequence[str] = ()) -> dict[str, Any]:
    """A line of an evaluation, with one response."""
    line = group(step, number, responses=1, text=text, images=images)
    line["responses"] = [{**line["responses"][0], "score": score, "reward": None, "advantage": None}]
    return line


def write_lines(file: Path, groups: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in groups))


def image_name(number: int) -> str:
    """The name of an image, which in runs is a hash."""
    return f"{number:032x}"


def save_image(file: Path, *, seed: int, side: int = 64) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)


@contextmanager
def served(page: LivePage) -> Iterator[Server]:
    """Serve a page on a free port."""
    with make_server(page, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
