"""Video files: the frames that are asked for, and one clear line for each kind of bad file."""

from __future__ import annotations

import io
from collections.abc import Sequence

import av
import numpy as np
import pytest
from video_files import DEMUXERS, frames_of, video_file

from vlmrl.data.image_source import Encoded
from vlmrl.data.video_file import VideoFacts, VideoLimits, read_frames
from vlmrl.errors import DataError

LIMITS = VideoLimits(frame_pixels=64 * 48, seconds=10.0)


def read(content: bytes, numbers: Sequence[int] = (0, 5, 10), limits: VideoLimits = LIMITS) -> list[float]:
    """Mean brightness of the frames."""
    _, frames = read_frames(Encoded(content, "the video"), limits=limits, choose=lambda _: (numbers, (32, 24)))
    assert {frame.size for frame in frames} == {(32, 24)}
    return [float(np.asarray(frame).mean()) for frame in frames]


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
        read(video_file(frames_of(30), rate=1000), limits=VideoLimits(64 * 48, 0.1))


def test_a_bomb_is_refused_by_its_header() -> None:
    with pytest.raises(DataError, match=r"frames of 64x48, more than 3000 pixels.*data\.max_video_frame_pixels"):
        read(video_file(frames_of(4)), limits=VideoLimits(3000, 10.0))


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
