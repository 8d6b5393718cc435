"""Writes down every prompt and answer of a step, with what became of it, for people who want to know what is learnt."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.system.storage import writing
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
        *,
        left_out: Sequence[tuple[Group, Sequence[Score], Floats]] = (),
    ) -> Path:
        """The answers of a training step, and of the groups that were drawn for it and left out.

        Args:
            step: names the file `step_NNNNNN.jsonl`, which replaces what an earlier run wrote of the step.
            groups: N prompts and their answers.
            scores: what the reward functions said of each answer, group by group.
            rewards: N arrays of [G], after shaping; NaN for an answer without a reward, which is written as null.
            advantages: one array of [T] per answer, all groups' in one list. The mean over the sampled tokens is
                written; for the estimators that give every token the same it is that value.
            left_out: groups that dynamic filtering drew and nothing was learnt from, with their scores and rewards.
                They come last, have no advantages, and say `left_out`.
        """
        by_answer = iter(advantages)
        learnt = [
            [
                {"reward": _number(reward), "advantage": _mean(next(by_answer), rollout)}
                for rollout, reward in zip(group.rollouts, group_rewards, strict=True)
            ]
            for group, group_rewards in zip(groups, rewards, strict=True)
        ]
        learnt += [[{"reward": _number(reward)} for reward in group_rewards] for _, _, group_rewards in left_out]
        every = [*groups, *(group for group, _, _ in left_out)]
        all_scores = [*scores, *(group_scores for _, group_scores, _ in left_out)]
        kinds = [{"left_out": False}] * len(groups) + [{"left_out": True}] * len(left_out)
        return self._write_lines(f"step_{step:06d}.jsonl", step, every, all_scores, learnt, kinds)

    def write_evaluation(
        self, step: int, name: str, groups: Sequence[Group], scores: Sequence[Sequence[Score]]
    ) -> Path:
        """The answers to the evaluation set `name`, after `step` steps."""
        nothing: list[list[dict[str, float | None]]] = [[{} for _ in group.rollouts] for group in groups]
        # A set may be called like a Hub id or a path.
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
        return self._write_lines(
            f"eval_{plain}_step_{step:06d}.jsonl", step, groups, scores, nothing, [{}] * len(groups)
        )

    def _write_lines(
        self,
        file: str,
        step: int,
        groups: Sequence[Group],
        scores: Sequence[Sequence[Score]],
        learnt: Iterable[Sequence[Mapping[str, float | None]]],
        kinds: Iterable[Mapping[str, bool]],
    ) -> Path:
        target = self._folder / file
        partial = target.with_suffix(".tmp")
        with writing(f"rollouts of step {step}", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._save_new_media([media for group in groups for media in group.prompt.media])
            # An answer may hold half a surrogate pair, which UTF-8 has not; the backslash form is JSON for it.
            with partial.open("w", encoding="utf-8", errors="backslashreplace") as lines:
                for record in _records(step, groups, scores, learnt, kinds):
                    lines.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            partial.replace(target)
        return target

    def _save_new_media(self, media: Sequence[Media]) -> None:
        new = {item.hash: item for item in media if item.hash not in self._saved}
        if new:
            self._save_media(self._folder / "media", list(new.values()))
            self._saved |= set(new)


def _records(
    step: int,
    groups: Sequence[Group],
    scores: Sequence[Sequence[Score]],
    learnt: Iterable[Sequence[Mapping[str, float | None]]],
    kinds: Iterable[Mapping[str, bool]],
) -> Iterator[dict[str, Any]]:
    for group, group_scores, group_learnt, kind in zip(groups, scores, learnt, kinds, strict=True):
        yield {
            "step": step,
            "index": group.prompt.index,
            "source": group.prompt.source,
            "prompt": group.prompt.text,
            "label": group.prompt.label,
            "images": [media.hash for media in group.prompt.media],
            "metadata": dict(group.prompt.metadata),
            **kind,
            "answers": [
                {
                    "text": rollout.text,
                    "score": score.earned if score.has_reward else None,
                    "parts": dict(score.parts),
                    "failure": score.failure,
                    "problem": score.problem,
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


def _number(reward: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(reward) else float(reward)
