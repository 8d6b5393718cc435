"""Write the prompts and responses of each step with their scores, rewards and advantages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from vlmrl.observe.traces import Trace
from vlmrl.system.storage import writing
from vlmrl.types import Floats, Group, Media, Rollout, Score


class Transcripts:
    """JSON lines files in one folder: one prompt with its responses per line, images as hashes.

    `save_media(folder, media)` writes images as `<hash>.png` in the process that holds the pixels. It gets each image
    once.
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
        teacher_gaps: Sequence[Floats] | None = None,
        traces: Mapping[tuple[int, int], Trace] | None = None,
        left_out: Sequence[tuple[Group, Sequence[Score], Floats]] = (),
    ) -> Path:
        """Write the responses of a training step, including groups that dynamic filtering left out.

        Args:
            step: names the file `step_NNNNNN.jsonl`, which replaces one that an earlier run wrote.
            groups: N prompts and their responses.
            scores: the score of each response, group by group.
            rewards: N arrays of [G], after shaping; NaN for a response without a reward, which is written as null.
            advantages: one array of [T] per segment of each response, over all groups. The mean over the sampled tokens
                of a response is written.
            teacher_gaps: the same of log-prob of the teacher minus the policy's, for runs with a teacher.
            traces: figures per token of some responses, by number of the group and of the response in it.
            left_out: groups that dynamic filtering excluded, with their scores and rewards. They come last, without
                advantages, and with `left_out` true.
        """
        columns = {"advantage": advantages} | ({} if teacher_gaps is None else {"teacher_gap": teacher_gaps})
        of_segments = {name: iter(rows) for name, rows in columns.items()}
        results: list[list[dict[str, Any]]] = [
            [
                {"reward": _number(reward)}
                | {name: _mean([next(rows) for _ in rollout.segments], rollout) for name, rows in of_segments.items()}
                for rollout, reward in zip(group.rollouts, group_rewards, strict=True)
            ]
            for group, group_rewards in zip(groups, rewards, strict=True)
        ]
        for (number, response), trace in (traces or {}).items():
            results[number][response]["trace"] = dict(trace)
        results += [[{"reward": _number(reward)} for reward in group_rewards] for _, _, group_rewards in left_out]
        all_groups = [*groups, *(group for group, _, _ in left_out)]
        all_scores = [*scores, *(group_scores for _, group_scores, _ in left_out)]
        flags = [{"left_out": False}] * len(groups) + [{"left_out": True}] * len(left_out)
        return self._write_lines(f"step_{step:06d}.jsonl", step, all_groups, all_scores, results, flags)

    def write_evaluation(
        self, step: int, name: str, groups: Sequence[Group], scores: Sequence[Sequence[Score]] | None
    ) -> Path:
        """Write the responses to the evaluation set `name`, after `step` steps. `scores` None: nothing scored them."""
        no_results: list[list[dict[str, Any]]] = [[{} for _ in group.rollouts] for group in groups]
        # The name may be a Hub id or a path. Unlike `_` for each odd character, %2F keeps `a/b` apart from `a_b`.
        file = f"eval_{quote(name, safe='')}_step_{step:06d}.jsonl"
        return self._write_lines(file, step, groups, scores, no_results, [{}] * len(groups))

    def _write_lines(
        self,
        file: str,
        step: int,
        groups: Sequence[Group],
        scores: Sequence[Sequence[Score]] | None,
        results: Iterable[Sequence[Mapping[str, Any]]],
        flags: Iterable[Mapping[str, bool]],
    ) -> Path:
        of_groups = scores if scores is not None else [[None] * len(group.rollouts) for group in groups]
        target = self._folder / file
        partial = target.with_suffix(".tmp")
        with writing(f"rollouts of step {step}", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._save_new_media([media for group in groups for media in _media(group)])
            # A response may hold a lone surrogate, which UTF-8 cannot encode; its backslash escape is valid JSON.
            with partial.open("w", encoding="utf-8", errors="backslashreplace") as lines:
                for record in _records(step, groups, of_groups, results, flags):
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
    scores: Sequence[Sequence[Score | None]],
    results: Iterable[Sequence[Mapping[str, Any]]],
    flags: Iterable[Mapping[str, bool]],
) -> Iterator[dict[str, Any]]:
    for group, group_scores, group_results, group_flags in zip(groups, scores, results, flags, strict=True):
        yield {
            "step": step,
            "index": group.prompt.index,
            "source": group.prompt.source,
            "prompt": group.prompt.text,
            "label": group.prompt.label,
            "images": [media.hash for media in group.prompt.media],
            "metadata": dict(group.prompt.metadata),
            **group_flags,
            "responses": [
                {
                    "text": rollout.text,
                    **_scores(score),
                    **numbers,
                    "tokens": rollout.num_sampled,
                    "finish_reason": rollout.finish_reason,
                    "version": min(rollout.versions, default=None),
                    **_conversation(rollout),
                }
                for rollout, score, numbers in zip(group.rollouts, group_scores, group_results, strict=True)
            ],
        }


def _scores(score: Score | None) -> dict[str, Any]:
    if score is None:
        return {"score": None, "parts": {}, "failure": None, "problem": None}
    earned = score.earned if score.has_reward else None
    return {"score": earned, "parts": dict(score.parts), "failure": score.failure, "problem": score.problem}


def _media(group: Group) -> list[Media]:
    return [*group.prompt.media, *(media for segment in group.segments for media in segment.media)]


def _conversation(rollout: Rollout) -> dict[str, Any]:
    """The turns of a conversation with an environment."""
    episode = rollout.episode
    if episode is None:
        return {}
    messages = [
        {
            "role": message.role,
            "text": message.text,
            "images": [media.hash for media in message.media],
            "reward": message.reward,
        }
        for message in episode.messages
    ]
    versions, retried = list(rollout.versions), list(episode.retried)
    return {"stop": episode.stop, "retried": retried, "messages": messages, "versions": versions}


def _mean(advantages: Sequence[Floats], rollout: Rollout) -> float:
    """The mean over all sampled tokens of a response, from one row per segment."""
    sampled = [row[segment.sampled] for row, segment in zip(advantages, rollout.segments, strict=True)]
    return float(np.concatenate(sampled).mean()) if rollout.num_sampled else 0.0


def _number(reward: float) -> float | None:
    """Convert a reward for JSON, which has no NaN."""
    return None if math.isnan(reward) else float(reward)
