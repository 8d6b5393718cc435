"""Train a small vision-language reward model that prefers correct responses to visual_math's questions.

    .venv/bin/python tests/end_to_end/preferences.py runs/quickstart/sft/model runs/visual_math_reward/model

It starts from a model that was trained on such questions, and gets a new head. For each question it sees the correct
response and wrong ones, and learns to prefer the correct one to all others: the Plackett-Luce model, which for two
responses is Bradley-Terry (arXiv:1706.03741). With the layout `shared`, the image is encoded once for all responses.
"""

# ruff: noqa: E402 - the stack can be imported once it is prepared

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vlmrl import startup

startup.prepare()

import numpy as np
import torch
from torch import Tensor

from vlmrl.config.data import Columns
from vlmrl.data.packing import Pack, make_pack
from vlmrl.data.prompts import PromptStream
from vlmrl.data.responses import sft_sample
from vlmrl.data.rows import load_all
from vlmrl.models.attention import implementation
from vlmrl.models.inputs import model_inputs, states_at
from vlmrl.models.value_head import Scale, ValueModel, save_value_model, value_net
from vlmrl.plugins import Processor, processor
from vlmrl.types import Prompt, Sample

CPU = torch.device("cpu")
COUNTING = "visual_math?families=count&difficulty=1&pixels=112&size=8000"
NUM_WRONG = 12


def teach(
    base: str,
    out: Path,
    *,
    dataset: str = COUNTING,
    steps: int = 160,
    batch_size: int = 32,
    lr: float = 3e-4,
    seed: int = 0,
) -> float:
    """Train a reward model from `base` and write it to `out`. Return the share of held-out wrong responses that score
    lower than the correct one."""
    torch.manual_seed(seed)
    reader = processor(base, min_pixels=3136, max_pixels=100_000)
    net = value_net(base, dtype=torch.float32, attn_implementation=implementation("auto", CPU), head_seed=seed)
    valuer = ValueModel(net).train()
    optimizer = torch.optim.AdamW(valuer.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1, cycle_momentum=False)
    for pack in packs(reader, dataset, "train", batch_size, steps, seed):
        right, wrong = apart(scores(valuer, reader, pack))
        loss = -torch.log_softmax(torch.cat([right, wrong], dim=1), dim=1)[:, 0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(valuer.parameters(), 1.0)
        optimizer.step()
        rate.step()
    held_out = evaluate(valuer.eval(), reader, dataset, seed)
    all_scores = torch.cat([held_out.right.flatten(), held_out.wrong.flatten()])
    save_value_model(net, reader, out, scale=Scale(float(all_scores.mean()), float(all_scores.std())))
    return float((held_out.right > held_out.wrong).float().mean())


class Pairs(tuple[Tensor, Tensor]):
    """Scores of correct responses, [N, 1], and of wrong ones to the same questions, [N, NUM_WRONG]."""

    @property
    def right(self) -> Tensor:
        return self[0]

    @property
    def wrong(self) -> Tensor:
        return self[1]


@torch.no_grad()
def evaluate(valuer: ValueModel, reader: Processor, dataset: str, seed: int) -> Pairs:
    """Score responses to 256 held-out questions."""
    batches = [apart(scores(valuer, reader, pack)) for pack in packs(reader, dataset, "test", 64, 4, seed)]
    return Pairs((torch.cat([pairs.right for pairs in batches]), torch.cat([pairs.wrong for pairs in batches])))


def scores(valuer: ValueModel, reader: Processor, pack: Pack) -> Tensor:
    """Score the samples of a single-row pack from the state at each last token: [B]."""
    positions = states_at(pack, [np.arange(len(s.tokens)) == len(s.tokens) - 1 for s in pack.samples])
    values = valuer(model_inputs(valuer.net, reader, pack), positions=positions).values
    return values[positions["scored"]]


def apart(values: Tensor) -> Pairs:
    by_question = values.view(-1, 1 + NUM_WRONG)
    return Pairs((by_question[:, :1], by_question[:, 1:]))


def packs(reader: Processor, dataset: str, split: str, batch_size: int, count: int, seed: int) -> Iterator[Pack]:
    """Yield packs of questions, each once, with the correct response first and then the wrong ones."""
    sources = load_all(dataset, split=split, max_samples=100_000, seed=seed)
    stream = PromptStream(sources, probs=None, processor=reader, columns=Columns(max_pixels=100_000), seed=seed)
    rng = random.Random(f"{split} {seed}")
    for _ in range(count):
        samples = [
            sample
            for n, prompt in enumerate(stream.draw(batch_size))
            for sample in labelled_samples(prompt, n, reader, rng)
        ]
        yield make_pack(samples, range(len(samples)), "shared")


def labelled_samples(prompt: Prompt, group: int, reader: Processor, rng: random.Random) -> Sequence[Sample]:
    assert prompt.label is not None
    texts = [prompt.label, *wrong_responses(prompt.label, rng)]
    return [replace(sft_sample(prompt, text, reader), group=group) for text in texts]


def wrong_responses(label: str, rng: random.Random) -> list[str]:
    """Make wrong responses: other numbers, the label with a suffix, and random text."""
    numbers = [str(number) for number in range(11) if str(number) != label][: NUM_WRONG - 2]
    more = label + rng.choice(["", " ", ", "]) + "".join(rng.choices("0123456789", k=rng.randint(1, 5)))
    other = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz .", k=rng.randint(0, 7)))
    return [*numbers, more, other]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder of the model to start from")
    parser.add_argument("out", type=Path, help="folder to write the reward model to")
    parser.add_argument("--steps", type=int, default=160)
    given = parser.parse_args()
    started = time.perf_counter()
    share = teach(given.base, given.out, steps=given.steps)
    print(f"right above wrong in {share:.1%} of held-out pairs, {time.perf_counter() - started:.0f} s: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
