"""Video files: the frames that are asked for, and one clear line for each kind of bad file."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
import pytest
from video_files import DEMUXERS, frames_of, video_file

from vlmrl.data import video_file as module
from vlmrl.data.image_source import Encoded
from vlmrl.data.video_file import VideoFacts, VideoLimits, read_frames
from vlmrl.data.video_packets import Packet, frame_times, runs_of
from vlmrl.errors import DataError

LIMITS = VideoLimits(frame_pixels=64 * 48, seconds=10.0, decoded_pixels=1e9, budget_pixels=10**7)


def read(content: bytes, numbers: Sequence[int] = (0, 5, 10), limits: VideoLimits = LIMITS) -> list[float]:
    """Mean brightness of the frames."""
    _, frames = read_frames(Encoded(content, "the video"), limits=limits, choose=lambda _: (numbers, (32, 24)))
    assert frames.shape == (len(numbers), 24, 32, 3)
    return [float(frame.mean()) for frame in frames]


@pytest.mark.parametrize("container", sorted(DEMUXERS))
def test_the_chosen_frames_are_read_from_every_container(container: str) -> None:
    frames = frames_of(16)
    read_levels = read(video_file(frames, container=container), (0, 7, 15))
    assert np.abs(np.array(read_levels) - frames[[0, 7, 15], 0, 0, 0]).max() < (24 if container == "gif" else 8)


def test_facts_come_from_the_packets() -> None:
    facts, _ = read_frames(
        Encoded(video_file(frames_of(12), container="webm"), "it"), limits=LIMITS, choose=lambda _: ([0], (8, 8))
    )
    assert facts == VideoFacts(64, 48, 12, 8.0)


def cut(content: bytes, seconds: float) -> bytes:
    """Cut the start off an MP4 file without encoding it anew: the frames since the key frame stay, and are hidden."""
    file = io.BytesIO()
    file.name = "cut.mp4"
    with av.open(io.BytesIO(content)) as whole, av.open(file, "w", format="mp4") as out:
        source = whole.streams.video[0]
        stream = out.add_stream_from_template(source)
        for packet in whole.demux(source):
            if packet.dts is not None and packet.pts is not None:
                assert source.time_base is not None
                offset = int(seconds / source.time_base)
                packet.stream, packet.pts, packet.dts = stream, packet.pts - offset, packet.dts - offset
                out.mux(packet)
    return file.getvalue()


def test_a_file_that_was_cut_has_the_frames_that_players_show() -> None:
    frames = frames_of(16)
    content = cut(video_file(frames), 0.5)  # 4 frames at 8 per second
    facts, _ = read_frames(Encoded(content, "it"), limits=LIMITS, choose=lambda _: ([0], (8, 8)))
    assert facts.num_frames == 12
    assert np.abs(np.array(read(content, (0, 11))) - frames[[4, 15], 0, 0, 0]).max() < 8


def cut_before(content: bytes, place: int) -> bytes:
    """Drop the packets before a place, which is no key frame: the decoder gives nothing up to the next one."""
    file = io.BytesIO()
    file.name = "cut.mkv"
    with av.open(io.BytesIO(content)) as whole, av.open(file, "w", format="matroska") as out:
        source = whole.streams.video[0]
        stream = out.add_stream_from_template(source)
        for number, packet in enumerate(packet for packet in whole.demux(source) if packet.size):
            if number >= place:
                packet.stream = stream
                out.mux(packet)
    return file.getvalue()


def test_frames_are_chosen_anew_where_the_first_packets_give_none() -> None:
    frames = frames_of(64)
    content = cut_before(video_file(frames, options={"g": "8", "bf": "0"}), 4)
    totals: list[int] = []

    def choose(facts: VideoFacts) -> tuple[list[int], tuple[int, int]]:
        totals.append(facts.num_frames)
        return [0, facts.num_frames - 1], (64, 48)

    facts, pixels = read_frames(Encoded(content, "it"), limits=LIMITS, choose=choose)
    assert totals == [60, 56]
    assert facts.num_frames == 56
    assert np.abs(pixels[:, 0, 0, 0].astype(int) - frames[[8, 63], 0, 0, 0]).max() < 8


@pytest.mark.parametrize(
    ("codec", "container", "options"),
    [
        ("libx264", "mp4", {"g": "8", "bf": "3"}),
        ("libx264", "matroska", {"x264-params": "keyint=8:bframes=3:open-gop=1"}),
        ("libx265", "mp4", {"x265-params": "keyint=8:bframes=3:open-gop=1:log-level=none"}),
        ("libvpx-vp9", "webm", {"g": "8"}),
        ("libvpx", "webm", {"g": "8", "auto-alt-ref": "1", "lag-in-frames": "10"}),
        ("mpeg4", "avi", {"g": "8", "bf": "2"}),
        ("gif", "gif", {}),
    ],
)
def test_frames_are_the_same_when_others_are_not_decoded(codec: str, container: str, options: dict[str, str]) -> None:
    frames = frames_of(64)
    frames[:, :, :32] = np.random.default_rng(0).integers(0, 128, (64, 48, 32, 3))
    encoded = Encoded(video_file(frames, container=container, codec=codec, options=options), "it")
    scan = module._scan(encoded, LIMITS)
    numbers = [0, 7, 20, 21, 22, 39, 63]
    skipping = module._decode(encoded, LIMITS, scan, numbers, (64, 48))
    counting = module._decode(encoded, LIMITS, scan._replace(times=None), numbers, (64, 48))
    assert skipping is not None
    assert counting is not None
    assert np.array_equal(skipping, counting)
    if container != "gif":
        assert scan.times is not None
        assert sum(map(len, runs_of(scan.packets, [scan.times[number] for number in numbers]))) < 40


def test_only_packets_since_the_key_frame_before_are_decoded() -> None:
    packets = [Packet(time, time in (0, 3), is_hidden=False) for time in (0, 2, 1, 3, 5, 4)]
    assert frame_times(packets) == [0, 1, 2, 3, 4, 5]
    assert runs_of(packets, [4]) == [range(3, 6)]
    assert runs_of(packets, [1]) == [range(3)]
    assert runs_of(packets, [0, 5]) == [range(1), range(3, 5)]
    # Shown before the key frame that it follows: it belongs to the one before.
    leading = [Packet(time, time in (0, 3), is_hidden=False) for time in (0, 1, 3, 2, 4)]
    assert runs_of(leading, [2]) == [range(4)]
    assert frame_times([Packet(None, True, is_hidden=False)]) is None
    assert frame_times([Packet(0, True, is_hidden=False)] * 2) is None


def test_the_work_of_decoding_is_bounded() -> None:
    content = video_file(frames_of(64), options={"g": "8"})
    limits = LIMITS._replace(decoded_pixels=20 * 64 * 48)
    assert len(read(content, (0, 63), limits)) == 2
    with pytest.raises(DataError, match=r"takes too long to decode: 6[0-4] frames of 64x48, 0\.0 billion pixels"):
        read(video_file(frames_of(64), options={"g": "64"}), (0, 63), limits)


@pytest.mark.parametrize(
    ("matrix", "corner"),
    [((0, 1, -1, 0), (5.5, 41.5)), ((-1, 0, 0, -1), (41.5, 57.5)), ((0, -1, 1, 0), (57.5, 5.5))],
    ids=["clockwise", "upside down", "counterclockwise"],
)
def test_recordings_of_phones_are_turned_as_players_do(matrix: tuple[int, ...], corner: tuple[float, float]) -> None:
    frames = np.zeros((8, 48, 64, 3), np.uint8)
    frames[:, :12, :12] = 255  # at the top left
    content = video_file(frames)
    place = content.index(b"tkhd") + 44
    a, b, c, d = (value * 2**16 for value in matrix)
    content = content[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 2**30) + content[place + 36 :]
    facts, pixels = read_frames(
        Encoded(content, "it"), limits=LIMITS, choose=lambda facts: ([0], (facts.width, facts.height))
    )
    assert (facts.width, facts.height) == ((64, 48) if matrix[0] else (48, 64))
    assert tuple(np.argwhere(pixels[0, :, :, 0] > 128).mean(axis=0)) == corner


def test_the_rate_of_a_recording_is_that_of_its_packets() -> None:
    file = io.BytesIO()
    file.name = "screen.webm"
    with av.open(file, "w", format="webm") as out:
        stream = out.add_stream("libvpx-vp9", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        # A second at 30 frames, then three seconds at 2.
        times = [*(n / 30 for n in range(30)), *(1 + n / 2 for n in range(6))]
        for time, pixels in zip(times, frames_of(36), strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(time * 1000), Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    facts, _ = read_frames(Encoded(file.getvalue(), "it"), limits=LIMITS, choose=lambda _: ([0], (8, 8)))
    assert facts.fps == pytest.approx(36 / 3.5, rel=0.05)


@pytest.mark.parametrize("container", ["webm", "matroska", "gif"])
def test_a_missing_end_is_noticed_in_every_container(container: str) -> None:
    whole = video_file(frames_of(32), container=container)
    for share in (0.5, 0.99):
        with pytest.raises(DataError, match=r"^the video is truncated: "):
            read(whole[: int(len(whole) * share)], (0,))


def test_a_file_that_promises_millions_of_frames_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    content = video_file(frames_of(8))
    place = content.index(b"stsz") + 4
    monkeypatch.setattr(av, "open", None)
    many = content[:place] + struct.pack(">3I", 0, 100, 4_000_000) + content[place + 12 :]
    with pytest.raises(DataError, match=r"longer than 10 s, or has more than 240 frames in each"):
        read(many)
    place = content.index(b"moov")
    with pytest.raises(DataError, match="has a compressed index"):
        read(content[:place] + b"moov" + struct.pack(">I4s", 8, b"cmov") + content[place + 12 :])


def test_a_truncated_file_is_refused() -> None:
    whole = video_file(np.random.default_rng(0).integers(0, 255, (16, 48, 64, 3), dtype=np.uint8))
    fragments = video_file(frames_of(16), fast_start=True)
    for content in (whole[: len(whole) // 2], whole[:40], fragments[: len(fragments) * 3 // 4]):
        with pytest.raises(DataError, match=r"^the video (is|has) (damaged|truncated|no )"):
            read(content, (0, 15))


def test_a_video_without_frames_is_refused() -> None:
    with pytest.raises(DataError, match=r"the video (has no frames|is not a readable video)"):
        read(video_file(frames_of(4)[:0]))


def test_two_hours_are_refused_before_a_frame_is_decoded() -> None:
    slow = video_file(frames_of(8), rate=0.001)
    with pytest.raises(DataError, match=r"is longer than 10 s.*raise data\.max_video_s"):
        read(slow)


def test_a_thousand_frames_per_second_are_refused() -> None:
    with pytest.raises(DataError, match=r"more than 240 frames in each"):
        read(video_file(frames_of(30), rate=1000), limits=LIMITS._replace(seconds=0.1))


def test_a_bomb_is_refused_by_its_header() -> None:
    with pytest.raises(DataError, match=r"frames of 64x48, more than 3000 pixels.*data\.max_video_frame_pixels"):
        read(video_file(frames_of(4)), limits=LIMITS._replace(frame_pixels=3000))


@pytest.mark.parametrize(
    "content",
    [
        b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"",
        b"\x89PNG\r\n",
        b"\x00" * 64,
    ],
)
def test_playlists_and_other_files_are_no_videos(content: bytes) -> None:
    with pytest.raises(DataError, match=r"is not a readable video .* supported are MP4, MOV, WebM"):
        read(content)


def test_sound_alone_is_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    with pytest.raises(DataError, match="has no video stream"):
        read(file.getvalue())
