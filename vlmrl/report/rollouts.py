"""Which of a run's responses the page shows: some steps, some prompts of each, within a number of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.report.embedding import embedded_size
from vlmrl.report.followed import followed_prompts, worths
from vlmrl.report.pictures import Pictures
from vlmrl.report.shown_groups import ShownGroup, shown_group
from vlmrl.report.transcript_lines import TRAINING, TranscriptFile, read_groups, transcript_files
from vlmrl.system.masking import Mask

MAX_STEPS = 40
"""Training steps of which responses are shown."""
MAX_EVALUATIONS = 12
"""Evaluations of each set of which responses are shown."""
PROMPTS_PER_STEP = 10
PROMPTS_PER_EVALUATION = 24
_IMAGES_SHARE = 1 / 16
"""Largest part of a page that the images of one prompt and its turns take, as long as other prompts need room."""
_GROUP_SHARE, _MIN_GROUP_BYTES = 1 / 64, 2**16
"""Part of a page that a prompt and its responses take, without images, and bytes that they may take in any page. With
long conversations a page shows a part of each, of all steps, instead of a few whole ones; and memory stays bounded."""
_SMALLEST_IMAGE = 200
"""Bytes: a page with less room is full, and reads no more images."""

_Orders = dict[TranscriptFile, list[ShownGroup]]
"""The groups of each file that may be shown, the most telling first."""


@dataclass(slots=True)
class ShownRollouts:
    """The responses that a page shows of a run."""

    groups: list[Mapping[str, Any]] = field(default_factory=list)
    images: dict[str, str] = field(default_factory=dict)
    """Hash -> data URL."""
    notes: list[str] = field(default_factory=list)
    """What is left out, a line each."""
    changes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Evaluation set -> how many of all its prompts score higher and lower in the last evaluation than in the first."""
    num_bytes: int = 0
    """Their size within the page."""


def shown_rollouts(
    folder: Path, *, max_bytes: int, max_side: int, mask: Mask, until: int | None = None
) -> ShownRollouts:
    """Choose responses from a run's `rollouts/`.

    Steps are the first, the last and some evenly between. Of an evaluation the same prompts are shown every time, those
    first whose reward changed; of a training step the best, the worst and the most mixed group come first. Every step
    gets its first prompt before any gets its second, so that a small page still covers the whole run.

    Args:
        until: the last step of the run. Files of later steps are of an earlier attempt, from whose past it resumed.
    """
    pictures = Pictures(folder / "media", max_side)
    files = [file for file in transcript_files(folder) if until is None or file.step <= until]
    by_set = {name: [file for file in files if file.set == name] for name in sorted({file.set for file in files})}
    chosen = {n: evenly(some, MAX_STEPS if n == TRAINING else MAX_EVALUATIONS) for n, some in by_set.items()}
    group_bytes = max(int(_GROUP_SHARE * max_bytes), _MIN_GROUP_BYTES)
    choice = _Choice(mask, followed_prompts(by_set.get(TRAINING, [])), max_bytes=group_bytes)
    shown = ShownRollouts(notes=[mask.strings(note) for note in _notes_on_steps(by_set, chosen)])
    for name, some in chosen.items():
        if name == TRAINING:
            choice.read_training(some)
        elif change := choice.read_evaluations(some):
            shown.changes[mask.strings(name)] = change
    if choice.num_unreadable:
        shown.notes.append(f"{choice.num_unreadable} lines of the transcripts cannot be read")
    shown.num_bytes = embedded_size([shown.notes, shown.changes]) + 256  # and the notes below
    skipped = 0
    blank: list[str] = []
    for group in _in_turns(choice.orders):
        left_out = _add(shown, group, pictures, max_bytes=max_bytes)
        blank += left_out or []
        skipped += left_out is None
        if skipped > 100:  # full
            break
    num_blank = _fill(shown, blank, pictures, max_bytes=max_bytes)
    shown.groups.sort(key=lambda group: (group["set"] != TRAINING, group["set"], group["step"], group["index"]))
    if len(shown.groups) < choice.num_groups:
        shown.notes.append(f"{len(shown.groups):,} of the {choice.num_groups:,} prompts of these steps are shown")
    if num_blank:
        shown.notes.append(f"{num_blank:,} images of turns are not shown")
    return shown


def evenly(items: Sequence[Any], number: int) -> list[Any]:
    """Return at most `number` items: the first, the last, and some evenly between. Example: 0..10, 3 -> 0, 5, 10."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]


def _notes_on_steps(
    by_set: Mapping[str, Sequence[TranscriptFile]], chosen: Mapping[str, Sequence[TranscriptFile]]
) -> Iterator[str]:
    for name, files in by_set.items():
        if len(chosen[name]) < len(files):
            what = "steps" if name == TRAINING else f"evaluations of {name}"
            yield f"{len(chosen[name])} of {len(files):,} {what} are shown, evenly spread"


class _Summary(NamedTuple):
    """What decides whether a group is shown."""

    number: int
    """Its place in the file."""
    source: str
    worth: float
    spread: float
    left_out: bool
    has_trace: bool


class _Choice:
    """Reads transcripts one after another, each twice: to choose groups, and to keep those that may be shown."""

    def __init__(self, mask: Mask, followed: Mapping[str, Sequence[TranscriptFile]], *, max_bytes: int) -> None:
        self._mask = mask
        self._max_bytes = max_bytes
        """Of a group."""
        self._followed: dict[TranscriptFile, set[str]] = {}
        for source, files in followed.items():
            for file in files:
                self._followed.setdefault(file, set()).add(source)
        self.orders: _Orders = {}
        self.num_groups = 0
        """Groups of the chosen steps."""
        self.num_unreadable = 0
        """Lines that are no groups."""

    def read_training(self, files: Iterable[TranscriptFile]) -> None:
        """Read steps: the most telling groups, and prompts that come up at several steps second in each of them."""
        for file in files:
            groups = self._summaries(file)
            self.num_groups += len(groups)
            telling = _telling_first(groups)[:PROMPTS_PER_STEP]
            self._keep(file, [*telling[:1], *self._followed_of(file, groups), *telling[1:]])
        # Prompts are also followed at steps that are not shown otherwise.
        for file in self._followed:
            if file not in self.orders:
                self._keep(file, self._followed_of(file, self._summaries(file)))

    def _followed_of(self, file: TranscriptFile, groups: Sequence[_Summary]) -> list[_Summary]:
        sources = self._followed.get(file, set())
        return [group for group in groups if group.source in sources and not group.left_out]

    def read_evaluations(self, files: Sequence[TranscriptFile]) -> dict[str, int] | None:
        """Read evaluations of a set, and return how its prompts changed from the first to the last."""
        before, after = (dict(worths(file)) for file in (files[0], files[-1]))
        changes = {source: after[source] - worth for source, worth in before.items() if source in after}
        changed = sorted((s for s in changes if changes[s]), key=lambda source: -changes[source])
        # In turn those that gained most, any, and those that lost most: the first ones alone would flatter the run.
        three = (changed, list(before)[: len(changed)], changed[::-1])
        order = dict.fromkeys([*chain.from_iterable(zip(*three, strict=True)), *before])
        rank = {source: number for number, source in enumerate(order)}
        for file in files:
            groups = self._summaries(file)
            self.num_groups += len(groups)
            groups.sort(key=lambda group: rank.get(group.source, len(rank)))
            self._keep(file, groups[:PROMPTS_PER_EVALUATION])
        if files[0].step == files[-1].step:
            return None
        return {
            "first_step": files[0].step,
            "last_step": files[-1].step,
            "total": len(changes),
            "gained": sum(change > 0 for change in changes.values()),
            "lost": sum(change < 0 for change in changes.values()),
        }

    def _summaries(self, file: TranscriptFile) -> list[_Summary]:
        summaries = []
        for number, group in enumerate(read_groups(file.path)):
            if group is None:
                self.num_unreadable += 1
            else:
                has_trace = any(response.trace for response in group.responses)
                summary = _Summary(number, group.source, group.worth, group.spread, group.left_out, has_trace)
                summaries.append(summary)
        return summaries

    def _keep(self, file: TranscriptFile, groups: Iterable[_Summary]) -> None:
        """Keep groups of a file, in this order."""
        numbers = list(dict.fromkeys(group.number for group in groups))
        chosen = set(numbers)
        shown = {
            number: shown_group(file, group, self._mask, max_bytes=self._max_bytes)
            for number, group in enumerate(read_groups(file.path) if chosen else ())
            if group is not None and number in chosen
        }
        self.orders[file] = [shown[number] for number in numbers if number in shown]  # the file may be another by now


def _telling_first(groups: Sequence[_Summary]) -> list[_Summary]:
    """The best, the worst and the most mixed group, then the others in order; those that were left out come last."""
    trained = [group for group in groups if not group.left_out] or list(groups)
    if not trained:
        return []
    best, worst = max(trained, key=lambda g: g.worth), min(trained, key=lambda g: g.worth)
    first = [best, worst, max(trained, key=lambda g: g.spread), *(g for g in trained if g.has_trace)]
    return list(dict.fromkeys([*first, *trained, *groups]))


def _in_turns(orders: _Orders) -> Iterator[ShownGroup]:
    """The first group of every file, then the second of every file, and so on; from both ends of the run inwards."""
    steps: dict[str, list[int]] = {}
    for file in orders:
        steps.setdefault(file.set, []).append(file.step)
    ends = {name: (min(some), max(some)) for name, some in steps.items()}
    files = sorted(orders, key=lambda file: min(file.step - ends[file.set][0], ends[file.set][1] - file.step))
    for number in range(max(map(len, orders.values()), default=0)):
        for file in files:
            if number < len(orders[file]):
                yield orders[file][number]


def _add(shown: ShownRollouts, group: ShownGroup, pictures: Pictures, *, max_bytes: int) -> list[str] | None:
    """Add a group if it and the images of its prompt fit, and the first images of its turns.

    Returns:
        The images of turns that are left out: those of one prompt must not crowd out others, however many turns it has.
        None: the group does not fit.
    """
    room = max_bytes - shown.num_bytes
    size = embedded_size(group.record) + 1
    new: dict[str, str] = {}
    left_out: list[str] = []
    size_of_images = 0
    for name in group.images:
        if size > room:
            return None
        is_of_prompt = name in group.record["images"]
        if name in shown.images:
            continue
        if not is_of_prompt and size_of_images > _IMAGES_SHARE * max_bytes:
            left_out.append(name)
            continue
        cost = _cost(name, pictures)
        if not is_of_prompt and size + cost > room:
            left_out.append(name)
            continue
        new[name] = pictures.url(name)
        size += cost
        size_of_images += cost
    if size > room:
        return None
    shown.groups.append(group.record)
    shown.images |= new
    shown.num_bytes += size
    return left_out


def _fill(shown: ShownRollouts, names: Iterable[str], pictures: Pictures, *, max_bytes: int) -> int:
    """Add images as far as there is room, and return how many are left out."""
    num_left_out = 0
    for name in dict.fromkeys(names):
        if name in shown.images:
            continue
        if shown.num_bytes + _SMALLEST_IMAGE > max_bytes or shown.num_bytes + _cost(name, pictures) > max_bytes:
            num_left_out += 1
            continue
        shown.images[name] = pictures.url(name)
        shown.num_bytes += _cost(name, pictures)
    return num_left_out


def _cost(name: str, pictures: Pictures) -> int:
    return embedded_size({name: pictures.url(name)})
