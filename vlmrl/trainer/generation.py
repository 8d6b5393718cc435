"""Responses of batch generation as records, and the rows that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.algorithms.signal import REWARD_ROUNDING
from vlmrl.trainer.evaluation import is_correct
from vlmrl.types import Group, Media, Metrics, Rollout, Score

IMAGES = "images"
"""Folder of the images, beside the file of the rows."""

Record = Mapping[str, Any]
"""A prompt with its responses, as JSON."""


def records(groups: Sequence[Group], scores: Sequence[Sequence[Score]] | None) -> list[Record]:
    """Return one record per prompt; `scores` None: nothing scored the responses."""
    of_groups: Sequence[Sequence[Score | None]] = scores or [[None] * len(group.rollouts) for group in groups]
    return [
        {
            "source": group.prompt.source,
            "input": group.prompt.question,
            "label": group.prompt.label,
            "images": [media.hash for media in group.prompt.media],
            "metadata": dict(group.prompt.metadata),
            "responses": [_response(*pair) for pair in zip(group.rollouts, group_scores, strict=True)],
        }
        for group, group_scores in zip(groups, of_groups, strict=True)
    ]


def _response(rollout: Rollout, score: Score | None) -> Record:
    has_score = score is not None and not score.failed
    return {
        "text": rollout.text,
        "tokens": rollout.num_sampled,
        "is_truncated": rollout.finish_reason == "length",
        "score": score.earned if score is not None and has_score else None,
        "is_correct": is_correct(score) if score is not None and has_score else None,
        "problem": score.problem or score.failure if score is not None and score.failed else None,
    }


def images_of(groups: Iterable[Group]) -> list[Media]:
    """Return the images of the prompts, each once."""
    return list({media.hash: media for group in groups for media in group.prompt.media}.values())


def rows(
    record: Record, *, keep: str, label_threshold: float | None = None, min_score: float | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows that are made of the responses to a prompt; see `generate.keep` and its thresholds.

    An empty response cannot be learnt from and is in no row. One that was cut, or has no score, is in rows of `all`
    only: supervised training would add an end where the model made none. `label_threshold` None: a response is good if
    it is correct.
    """
    written = [response for response in record["responses"] if response["text"].strip()]
    if keep == "all":
        for response in written:
            yield _row(record, answer=response["text"], score=response["score"], truncated=response["is_truncated"])
        return
    scored = [response for response in written if response["score"] is not None and not response["is_truncated"]]
    if keep == "labels":
        for response in scored:
            is_good = response["is_correct"] if label_threshold is None else response["score"] > label_threshold
            own = {"answer": response["text"], "expected": record["label"], "label": is_good}
            yield _row(record, **own, score=response["score"])
        return
    if not scored:
        return
    best = max(scored, key=lambda response: response["score"])  # the first of equals
    if min_score is not None and best["score"] < min_score - REWARD_ROUNDING:
        return
    worst = min(scored, key=lambda response: response["score"])
    if keep == "best":
        yield _row(record, answer=best["text"], score=best["score"])
    elif best["score"] > worst["score"] and best["text"] != worst["text"]:
        own = {"chosen": best["text"], "rejected": worst["text"]}
        yield _row(record, **own, score=best["score"], margin=best["score"] - worst["score"])


_RESERVED = frozenset(
    {
        *("instruction", "prompt", "messages", "conversations", "answer", "completion", "response", "expected"),
        *("chosen", "rejected", "margin", "score", "truncated", "images"),
    }
)
"""Columns that a verb would read instead of those that are written, or along with them."""


def _row(record: Record, **own: Any) -> dict[str, Any]:
    kept = {name: value for name, value in record["metadata"].items() if name not in _RESERVED}
    row = {**kept, "source": record["source"], "input": record["input"], "label": record["label"]}
    if record["images"]:
        row["images"] = [f"{IMAGES}/{name}.png" for name in record["images"]]
    return {name: value for name, value in {**row, **own}.items() if value is not None}


@dataclass(slots=True)
class Totals:
    """Sums over responses, for the metrics of all."""

    rows: int = 0
    responses: int = 0
    scored: int = 0
    failed: int = 0
    empty: int = 0
    truncated: int = 0
    tokens: int = 0
    score: float = 0.0
    pass_rates: float = 0.0
    """Sum over prompts of the fraction of their scored responses that is correct."""
    rows_with_score: int = 0

    def add(self, record: Record) -> None:
        """Add a prompt with its responses."""
        responses = record["responses"]
        scored = [response for response in responses if response["score"] is not None]
        self.rows += 1
        self.responses += len(responses)
        self.scored += len(scored)
        self.failed += sum(response["problem"] is not None for response in responses)
        self.empty += sum(not response["text"].strip() for response in responses)
        self.truncated += sum(response["is_truncated"] for response in responses)
        self.tokens += sum(response["tokens"] for response in responses)
        self.score += sum(response["score"] for response in scored)
        if scored:
            self.pass_rates += sum(response["is_correct"] for response in scored) / len(scored)
            self.rows_with_score += 1

    def batch_metrics(self, seconds: float) -> Metrics:
        """Return the metrics of a step, of a batch that took so long."""
        metrics = {"throughput/tokens_per_s": self.tokens / seconds}
        if self.responses:
            metrics["response/tokens_mean"] = self.tokens / self.responses
            metrics["response/truncated_fraction"] = self.truncated / self.responses
        if self.scored:
            metrics["reward/mean"] = self.score / self.scored
        return metrics

    def metrics(self, *, written: int, tokens_per_s: float | None) -> Metrics:
        """Return the metrics of all responses, of which so many rows were written; means over none are left out."""
        metrics = {
            "generate/rows": float(self.rows),
            "generate/responses": float(self.responses),
            "generate/written": float(written),
            "generate/failed": float(self.failed),
            "generate/empty": float(self.empty),
        }
        if self.responses:
            metrics["generate/tokens_mean"] = self.tokens / self.responses
            metrics["generate/truncated_fraction"] = self.truncated / self.responses
        if self.scored:
            metrics["generate/reward"] = self.score / self.scored
            metrics["generate/pass@1"] = self.pass_rates / self.rows_with_score
        if tokens_per_s is not None:
            metrics["generate/tokens_per_s"] = tokens_per_s
        return metrics
