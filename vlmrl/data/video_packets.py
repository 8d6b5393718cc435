"""Which packets of a video file have to be decoded for the frames at given times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Packet(NamedTuple):
    """A packet of a video stream."""

    time: int | None
    """When its frame is shown, in the stream's unit."""
    is_key: bool
    """Decoding can begin here."""
    is_hidden: bool
    """It gives no frame, but others need it."""


def frame_times(packets: Sequence[Packet]) -> list[int] | None:
    """Return the times of all frames, rising; None if packets lack times, or share one."""
    times = [packet.time for packet in packets if not packet.is_hidden]
    known = sorted({time for time in times if time is not None})
    return known if len(known) == len(times) else None


def runs_of(packets: Sequence[Packet], times: Sequence[int]) -> list[range]:
    """Return the packets, as ranges in their order in the file, from which the frames at `times` are decoded.

    The frame of a packet needs those since the last key frame that is shown no later than it. A packet behind a key
    frame but shown before it belongs to the one before.

    Example: packets shown at 0 (key), 2, 1, 3 (key), 5, 4; the frame at 4 needs range(3, 6), that at 1 range(0, 3).
    """
    place_of = {packet.time: place for place, packet in enumerate(packets) if not packet.is_hidden}
    keys = sorted(
        (packet.time, place) for place, packet in enumerate(packets) if packet.is_key and packet.time is not None
    )
    needed: list[tuple[int, int]] = []
    number = start = 0
    for time in sorted(times):
        while number < len(keys) and keys[number][0] <= time:
            start = keys[number][1]
            number += 1
        needed.append((min(start, place_of[time]), place_of[time] + 1))
    runs: list[range] = []
    for first, end in sorted(needed):
        if runs and first <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, end))
        else:
            runs.append(range(first, end))
    return runs
