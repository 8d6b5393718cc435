"""Writes down every prompt and answer of a step, with what became of it, for people who want to know what is learnt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.types import Floats, Group, Media, Rollout, Score


class Transcripts:
    """Files of JSON lines in one folder: a prompt per line, its answers in it, its images by the hash that names them.

    `save_media(folder, media)` writes images as `<hash>.png`; it is asked for every image once, since images live
    where the pixels are and not in the process that runs the loop.
    """

    def __init__(self, folder: Path, save_media: Callable[[Path, Sequence[Media]], None]) -> None:
        self._folder = folder
        self._save_media = save_media
        self._saved: set[str] = set()

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        scores: Sequence[Sequence[Score]],
        rewards: Sequence[Floats],
        advantages: Sequence[Floats],
    ) -> Path:
        """The answers of a training step.

        Args:
            step: names the file `step_NNNNNN.jsonl`, which replaces what an earlier run wrote of the step.
            groups: N prompts and their answers.
            scores: what the reward functions said of each answer, group by group.
            rewards: N arrays of [G], after shaping.
            advantages: one array of [T] per answer, all groups' in one list. The mean over the sampled tokens is
                written; for the estimators that give every token the same it is that value.
        """
        by_answer = iter(advantages)
        learnt = (
            [
                {"reward": float(reward), "advantage": _mean(next(by_answer), rollout)}
                for rollout, reward in zip(group.rollouts, group_rewards, strict=True)
            ]
            for group, group_rewards in zip(groups, rewards, strict=True)
        )
        return self._write_lines(f"step_{step:06d}.jsonl", step, groups, scores, learnt)

    def write_evaluation(
        self, step: int, name: str, groups: Sequence[Group], scores: Sequence[Sequence[Score]]
    ) -> Path:
        """The answers to the evaluation set `name`, after `step` steps."""
        nothing: list[list[dict[str, float]]] = [[{} for _ in group.rollouts] for group in groups]
        # A set may be called like a Hub id or a path.
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
        return self._write_lines(f"eval_{plain}_step_{step:06d}.jsonl", step, groups, scores, nothing)

    def _write_lines(
        self,
        file: str,
        step: int,
        groups: Sequence[Group],
        scores: Sequence[Sequence[Score]],
        learnt: Iterable[Sequence[Mapping[str, float]]],
    ) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        new = {media.hash: media for group in groups for media in group.prompt.media if media.hash not in self._saved}
        if new:
            self._save_media(self._folder / "media", list(new.values()))
            self._saved |= set(new)
        target = self._folder / file
        partial = target.with_suffix(".tmp")
        # An answer may hold half a surrogate pair, which UTF-8 has not; the backslash form is JSON for it.
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as lines:
            for record in _records(step, groups, scores, learnt):
                lines.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        partial.replace(target)
        return target


def _records(
    step: int,
    groups: Sequence[Group],
    scores: Sequence[Sequence[Score]],
    learnt: Iterable[Sequence[Mapping[str, float]]],
) -> Iterator[dict[str, Any]]:
    for group, group_scores, group_learnt in zip(groups, scores, learnt, strict=True):
        yield {
            "step": step,
            "index": group.prompt.index,
            "source": group.prompt.source,
            "prompt": group.prompt.text,
            "label": group.prompt.label,
            "images": [media.hash for media in group.prompt.media],
            "metadata": dict(group.prompt.metadata),
            "answers": [
                {
                    "text": rollout.text,
                    "score": score.earned,
                    "parts": dict(score.parts),
                    "failed": score.failed,
                    **numbers,
                    "tokens": rollout.num_sampled,
                    "finish_reason": rollout.finish_reason,
                    "version": rollout.version,
                }
                for rollout, score, numbers in zip(group.rollouts, group_scores, group_learnt, strict=True)
            ],
        }


def _mean(advantages: Floats, rollout: Rollout) -> float:
    return float(advantages[rollout.sampled].mean()) if rollout.num_sampled else 0.0
