"""Which of a run's responses the page shows: some steps, some prompts of each, within a number of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from vlmrl.report.curves import shortened
from vlmrl.report.followed import followed_prompts
from vlmrl.report.masking import mask_urls
from vlmrl.report.pictures import Pictures
from vlmrl.report.transcript_lines import (
    TRAINING,
    Group,
    Message,
    Response,
    TranscriptFile,
    read_lines,
    transcript_files,
)

MAX_STEPS = 40
"""Training steps of which responses are shown."""
MAX_EVALUATIONS = 12
"""Evaluations of each set of which responses are shown."""
PROMPTS_PER_STEP = 10
PROMPTS_PER_EVALUATION = 24
_MAX_CHARS = 12_000
"""A longer text is shown without its middle."""
_MAX_MESSAGES = 60
"""A longer conversation is shown without its middle."""
_MAX_RESPONSES = 32
"""Responses of a group that are shown."""


@dataclass(slots=True)
class ShownRollouts:
    """The responses that a page shows of a run."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    images: dict[str, str] = field(default_factory=dict)
    """Hash -> data URL."""
    notes: list[str] = field(default_factory=list)
    """What is left out, a line each."""
    changes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Evaluation set -> how many of all its prompts score higher and lower in the last evaluation than in the first."""
    num_bytes: int = 0


def shown_rollouts(folder: Path, *, max_bytes: int, max_side: int) -> ShownRollouts:
    """Choose responses from a run's `rollouts/`.

    Steps are the first, the last and some evenly between. Of an evaluation the same prompts are shown every time, those
    first whose reward changed; of a training step the best, the worst and the most mixed group come first. Every step
    gets its first prompt before any gets its second, so that a small page still covers the whole run.
    """
    shown = ShownRollouts()
    pictures = Pictures(folder / "media", max_side)
    files = transcript_files(folder)
    chosen = [file for name in dict.fromkeys(f.set for f in files) for file in _steps_of(files, name)]
    read = {file: read_lines(file.path) for file in chosen}
    unreadable = sum(lines.num_unreadable for lines in read.values())
    if unreadable:
        shown.notes.append(f"{unreadable} lines of the transcripts cannot be read")
    _note_steps(shown, files, chosen)
    groups = {file: lines.groups for file, lines in read.items()}
    shown.changes = _changes(groups)
    skipped = 0
    orders = {file: order for name in {f.set for f in chosen} for file, order in _orders(groups, name)}
    _follow(orders, groups, followed_prompts([file for file in files if file.set == TRAINING]))
    for group in _in_turns(orders):
        skipped += not _add(shown, *group, pictures, max_bytes=max_bytes)
        if skipped > 100:  # full
            break
    shown.groups.sort(key=lambda group: (group["set"] != TRAINING, group["set"], group["step"], group["index"]))
    total = sum(map(len, groups.values()))
    if len(shown.groups) < total:
        shown.notes.append(f"{len(shown.groups):,} of the {total:,} prompts of these steps are shown")
    return shown


def _steps_of(files: Sequence[TranscriptFile], name: str) -> list[TranscriptFile]:
    of_set = [file for file in files if file.set == name]
    return evenly(of_set, MAX_STEPS if name == TRAINING else MAX_EVALUATIONS)


def evenly(items: Sequence[Any], number: int) -> list[Any]:
    """Return at most `number` items: the first, the last, and some evenly between. Example: 0..10, 3 -> 0, 5, 10."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]


def _changes(groups: Mapping[TranscriptFile, Sequence[Group]]) -> dict[str, dict[str, int]]:
    changes = {}
    for name in {file.set for file in groups} - {TRAINING}:
        of_set = {file.step: {g.source: g.worth for g in some} for file, some in groups.items() if file.set == name}
        first, last = min(of_set), max(of_set)
        differences = [of_set[last][s] - worth for s, worth in of_set[first].items() if s in of_set[last]]
        if first < last:
            changes[name] = {
                "first_step": first,
                "last_step": last,
                "total": len(differences),
                "gained": sum(d > 0 for d in differences),
                "lost": sum(d < 0 for d in differences),
            }
    return changes


def _note_steps(shown: ShownRollouts, files: Sequence[TranscriptFile], chosen: Sequence[TranscriptFile]) -> None:
    for name in dict.fromkeys(file.set for file in files):
        num_files, num_chosen = (sum(file.set == name for file in some) for some in (files, chosen))
        if num_chosen < num_files:
            what = "steps" if name == TRAINING else f"evaluations of {name}"
            shown.notes.append(f"{num_chosen} of {num_files:,} {what} are shown, evenly spread")


def _orders(
    groups: Mapping[TranscriptFile, Sequence[Group]], name: str
) -> Iterator[tuple[TranscriptFile, list[Group]]]:
    """The groups of each file of a set, the most telling first."""
    of_set = {file: file_groups for file, file_groups in groups.items() if file.set == name}
    if name == TRAINING:
        for file, file_groups in of_set.items():
            yield file, _telling_first(file_groups)[:PROMPTS_PER_STEP]
        return
    first, *_, last = [*of_set.values(), *of_set.values()]
    before, after = ({g.source: g.worth for g in some} for some in (first, last))
    changes = {source: after[source] - before[source] for source in before if source in after}
    changed = sorted((s for s in changes if changes[s]), key=lambda source: -changes[source])
    # In turn those that gained most, any, and those that lost most: the first ones alone would flatter the run.
    three = (changed, list(before)[: len(changed)], changed[::-1])
    order = dict.fromkeys([*chain.from_iterable(zip(*three, strict=True)), *before])
    rank = {source: number for number, source in enumerate(order)}
    for file, file_groups in of_set.items():
        yield file, sorted(file_groups, key=lambda g: rank.get(g.source, len(rank)))[:PROMPTS_PER_EVALUATION]


def _follow(
    orders: dict[TranscriptFile, list[Group]],
    read: Mapping[TranscriptFile, Sequence[Group]],
    followed: Mapping[str, Sequence[TranscriptFile]],
) -> None:
    """Add prompts that come up at several steps, second in each step, also at steps that are not shown otherwise."""
    sources: dict[TranscriptFile, list[str]] = {}
    for source, files in followed.items():
        for file in files:
            sources.setdefault(file, []).append(source)
    for file, names in sources.items():
        of_file = read[file] if file in read else read_lines(file.path).groups
        found = [group for group in of_file if group.source in names and not group.left_out]
        order = orders.get(file, [])
        orders[file] = list({id(group): group for group in (*order[:1], *found, *order[1:])}.values())


def _telling_first(groups: Sequence[Group]) -> list[Group]:
    """The best, the worst and the most mixed group, then the others in order; those that were left out come last."""
    trained = [group for group in groups if not group.left_out] or list(groups)
    if not trained:
        return []
    best, worst = max(trained, key=lambda g: g.worth), min(trained, key=lambda g: g.worth)
    first = [best, worst, max(trained, key=_spread), *(g for g in trained if any(r.trace for r in g.responses))]
    kept = {id(group): group for group in (*first, *trained, *groups)}
    return list(kept.values())


def _spread(group: Group) -> float:
    rewards = [r.worth for r in group.responses if r.worth is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _in_turns(orders: Mapping[TranscriptFile, Sequence[Group]]) -> Iterator[tuple[TranscriptFile, Group]]:
    """The first group of every file, then the second of every file, and so on; from both ends of the run inwards."""
    steps = {file.set: [f.step for f in orders if f.set == file.set] for file in orders}
    files = sorted(orders, key=lambda file: _distance_from_end(steps[file.set], file.step))
    for number in range(max(map(len, orders.values()), default=0)):
        for file in files:
            if number < len(orders[file]):
                yield file, orders[file][number]


def _distance_from_end(steps: Sequence[int], step: int) -> int:
    return min(step - min(steps), max(steps) - step)


def _add(shown: ShownRollouts, file: TranscriptFile, group: Group, pictures: Pictures, *, max_bytes: int) -> bool:
    """Add a group and its images if they fit."""
    record = _group(file, group)
    names = [*group.images, *(image for r in group.responses for m in r.messages for image in m.images)]
    new = {name: pictures.url(name) for name in names if name not in shown.images}
    size = len(json.dumps(record)) + sum(len(name) + len(url) + 8 for name, url in new.items())
    if shown.num_bytes + size > max_bytes:
        return False
    shown.groups.append(record)
    shown.images |= new
    shown.num_bytes += size
    return True


def _group(file: TranscriptFile, group: Group) -> dict[str, Any]:
    return {
        "set": file.set,
        "step": file.step,
        "index": group.index,
        "source": mask_urls(group.source),
        "prompt": _clipped(group.prompt),
        "label": None if group.label is None else _clipped(group.label),
        "images": group.images,
        "metadata": {name: _clipped(_plain(value)) for name, value in group.metadata.items()},
        **({"left_out": True} if group.left_out else {}),
        "responses": [_response(response) for response in group.responses[:_MAX_RESPONSES]],
        **({"more": len(group.responses) - _MAX_RESPONSES} if len(group.responses) > _MAX_RESPONSES else {}),
    }


def _response(response: Response) -> dict[str, Any]:
    record = {
        "text": _clipped(response.text),
        "score": _short(response.score),
        "reward": _short(response.reward),
        "advantage": _short(response.advantage),
        "teacher_gap": _short(response.teacher_gap),
        "parts": {name: _short(value) for name, value in response.parts.items()},
        "tokens": response.tokens,
        "finish": response.finish_reason,
        "failure": response.failure,
        "problem": None if response.problem is None else mask_urls(_clipped(response.problem)),
        "version": response.version,
        "stop": response.stop,
        "messages": [_message(message) for message in _without_middle(response.messages)],
        "trace": response.trace,
    }
    return {name: value for name, value in record.items() if value not in (None, [], {})}


def _message(message: Message) -> dict[str, Any]:
    record = {"role": message.role, "text": _clipped(message.text), "images": message.images, "reward": message.reward}
    return {name: value for name, value in record.items() if value not in (None, [])}


def _without_middle(messages: Sequence[Message]) -> list[Message]:
    left_out = len(messages) - _MAX_MESSAGES
    if left_out <= 0:
        return list(messages)
    half = _MAX_MESSAGES // 2
    return [*messages[:half], Message("", f"[{left_out} messages are not shown]"), *messages[-half:]]


def _clipped(text: str) -> str:
    """The text without the middle, if it is long."""
    left_out = len(text) - _MAX_CHARS
    if left_out <= 0:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]}\n[{left_out:,} characters are not shown]\n{text[-half:]}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _short(value: float | None) -> float | None:
    return None if value is None else shortened(value)
