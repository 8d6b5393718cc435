"""Training of a reward model: scores of whole responses or of their steps, and optimizer steps on preferences or
labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vlmrl.algorithms.preferences import bradley_terry_loss, step_loss
from vlmrl.data.packing import Pack
from vlmrl.learning.base import PackLoss, TrainableModel
from vlmrl.learning.checkpoint import save_model
from vlmrl.learning.forward import RowsAndMetrics, StateForward, last_token, read_value_model
from vlmrl.learning.settings import RewardTrainerSettings
from vlmrl.models.linear_attention import mixes_samples
from vlmrl.models.patch_cost import patch_cost
from vlmrl.models.value_head import ValueModel
from vlmrl.observe.metrics import Mean, Metric, Sum, merge
from vlmrl.types import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardTrainer(TrainableModel):
    """A reward model in training. Its methods are collectives but `table`, `traits` and `memory`."""

    _area = "rm"
    _section = "actor"
    _forward: StateForward

    def __init__(self, settings: RewardTrainerSettings) -> None:
        """A model without a score layer gets a new one, initialized from `settings.loop.seed`."""
        model, ds, columns, loop = settings.actor, settings.ds, settings.columns, settings.loop
        super().__init__(
            lambda where: read_value_model(
                model, ds=ds, columns=columns, where=where, head_seed=loop.seed, flag="actor.model_name_or_path"
            ),
            model=model,
            ds=ds,
            loop=loop,
            adapter=settings.adapter,
        )
        # Adding an adapter froze it.
        self._net.score.requires_grad_(True)
        value_model = ValueModel(self._net, self._sequence)
        options = self._start_engine(value_model, total_steps=settings.total_steps, vision=settings.vision)
        self._forward = StateForward(value_model, self._processor, **options)

    def scores(self, packs: Sequence[Pack]) -> tuple[list[tuple[int, float]], dict[str, Metric]]:
        """Scores under the current weights, as `RewardModel.score` computes them without a scale: (id, score) for each
        sample with a non-negative id; and pass metrics."""
        return self._forward.scores(packs), self._forward.take_counts()

    def values_at(self, packs: Sequence[Pack], labels: Mapping[int, Floats]) -> RowsAndMetrics:
        """Log-odds at the labelled tokens: (id, [T]) for each sample with a non-negative id, and pass metrics.

        `labels` holds [T] for each id, NaN on tokens without a label.
        """
        rows = self._forward.values_at(packs, [_labelled(pack, labels) for pack in packs])
        return rows, self._forward.take_counts()

    def fit_pairs(self, packs: Sequence[Pack], margins: Sequence[float]) -> dict[str, Metric]:
        """Take one optimizer step on the mean Bradley-Terry loss of all pairs of the step.

        Sample 2i is the chosen response of pair i, and 2i + 1, in the same pack, the rejected one.

        Args:
            margins: of all pairs of the step, on all ranks.

        Raises VlmrlError when the loss or the gradient is not finite.
        """
        with self._optimizer_awake():
            shares = [
                self._backward(self._pair_loss(pack, margins), pack, number=n, of=packs)
                for n, pack in enumerate(packs, start=1)
            ]
            return merge([*shares, self._step()])

    def fit_steps(self, packs: Sequence[Pack], labels: Mapping[int, Floats]) -> dict[str, Metric]:
        """Take one optimizer step on the mean cross-entropy of all labelled tokens of the step.

        Args:
            labels: for each sample of the step, on all ranks, [T]: the probability that the step which ends at the
                token is correct; NaN on other tokens.

        Raises VlmrlError when the loss or the gradient is not finite.
        """
        num_steps = sum(int(np.isfinite(row).sum()) for row in labels.values())
        with self._optimizer_awake():
            shares = [
                self._backward(self._step_loss(pack, labels, num_steps), pack, number=n, of=packs)
                for n, pack in enumerate(packs, start=1)
            ]
            return merge([*shares, self._step()])

    def traits(self) -> tuple[float, bool]:
        """See `Policy.traits`."""
        return patch_cost(self._net, self._processor), mixes_samples(self._net)

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the full training state, from which `load_checkpoint` resumes bit for bit; `extra` is plain JSON."""
        self._save_state(folder, extra)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Resume from a checkpoint, random states included; returns its `extra`.

        Raises ConfigError when the checkpoint is of another model, number of ranks or ZeRO stage.
        """
        return self._load_state(folder)

    def save_model(self, folder: Path, scale: tuple[float, float] | None) -> None:
        """Write a folder that `reward.model_name_or_path` may name: the whole model, with adapters merged.

        A `scale`, mean and deviation of scores, is stored in config.json under OpenRLHF's names, `mean` and `std`.
        """
        config = self._net.config
        if scale is not None:
            config.mean, config.std = scale
        # Transformers' classifiers score the last token of a row that is not `pad_token_id`.
        tokenizer = self._processor.tokenizer
        tokenizer.pad_token = padding_token(tokenizer)
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
        save_model(self._net, self._processor, Path(folder), merge=self._adapted is not None)

    def _pair_loss(self, pack: Pack, margins: Sequence[float]) -> PackLoss:
        last = dict(zip(pack.ids, _last_positions(pack), strict=True))
        pairs = sorted({sample_id // 2 for sample_id in pack.ids if sample_id >= 0})
        places = torch.tensor([[last[2 * pair], last[2 * pair + 1]] for pair in pairs], dtype=torch.int64)
        values = self._forward(pack, [last_token(sample) for sample in pack.samples])
        chosen, rejected = values.flatten()[places.view(-1, 2).to(self._device)].unbind(1)
        margin = torch.tensor([margins[pair] for pair in pairs], dtype=values.dtype, device=self._device)
        share = bradley_terry_loss(chosen, rejected, margin=margin).sum() / len(margins)
        with torch.no_grad():
            difference = chosen - rejected
            sums = {
                "pairs": torch.tensor(float(len(pairs)), device=self._device),
                "correct": (difference > 0).sum(),
                "difference": difference.sum(),
                "score": (chosen + rejected).sum(),
            }
        return share, sums

    def _step_loss(self, pack: Pack, labels: Mapping[int, Floats], num_steps: int) -> PackLoss:
        marks = _labelled(pack, labels)
        values = self._forward(pack, marks)
        is_labelled = self._place(pack, marks, fill=False)
        columns = [
            np.nan_to_num(labels[i]) if i >= 0 else np.zeros(len(sample.tokens), dtype=np.float32)
            for i, sample in zip(pack.ids, pack.samples, strict=True)
        ]
        targets = self._place(pack, columns, fill=0.0)[is_labelled].to(values.dtype)
        # A pack of fillers has no label; its zero keeps the pass in the graph.
        odds = values[is_labelled]
        share = step_loss(odds, targets).sum() / num_steps
        with torch.no_grad():
            sums = {"steps": is_labelled.sum(), "correct": ((odds > 0) == (targets > 0.5)).sum()}
        return share, sums

    def _pack_metrics(self, sums: dict[str, float], pack: Pack) -> dict[str, Metric]:
        rows, columns = pack.shape
        metrics: dict[str, Metric] = {
            "pack/tokens": Sum(pack.num_tokens),
            "pack/padding_fraction": Mean(rows * columns - pack.num_tokens, rows * columns),
            "pack/shared_fraction": Mean(pack.num_useful - pack.num_tokens, pack.num_useful),
            "rm/accuracy": Mean(sums["correct"], sums.get("pairs", sums.get("steps", 0.0))),
        }
        if "aux_loss" in sums:
            metrics["rm/aux_loss"] = Mean(sums["aux_loss"], sums["balanced"])
        if "pairs" in sums:
            metrics |= {
                "rm/difference": Mean(sums["difference"], sums["pairs"]),
                "rm/score": Mean(sums["score"], 2 * sums["pairs"]),
            }
        return metrics


def padding_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token that pads batches of a saved reward model: the tokenizer's own, unless that also ends responses.

    None where a tokenizer has no other special token: Transformers then refuses batches, and still scores single rows.
    """
    others = [tokenizer.pad_token, *tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
    return next((token for token in others if token not in {None, tokenizer.eos_token}), None)


def _last_positions(pack: Pack) -> list[int]:
    """Index in [B * T] of each sample's last token."""
    _, width = pack.shape
    index = [-1] * len(pack.samples)
    for piece in pack.pieces:
        if piece.last == len(pack.samples[piece.sample].tokens):
            index[piece.sample] = piece.row * width + piece.start + piece.last - piece.first - 1
    assert min(index) >= 0, "a response to score has at least its end token"
    return index


def _labelled(pack: Pack, labels: Mapping[int, Floats]) -> list[Any]:
    """[T] per sample: True at the labelled tokens; none of a filler."""
    return [
        np.isfinite(labels[i]) if i >= 0 else np.zeros(len(sample.tokens), dtype=np.bool_)
        for i, sample in zip(pack.ids, pack.samples, strict=True)
    ]
