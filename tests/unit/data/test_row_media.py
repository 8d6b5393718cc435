"""Images and videos of a row: places in the question, forms of a video, and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from video_files import frames_of, video_file

from vlmrl.config.data import Columns
from vlmrl.data.conversations import read_conversation
from vlmrl.data.image_source import ImageAccess
from vlmrl.data.media import InlineMedia
from vlmrl.data.row_media import MediaRules, as_videos, open_row_media, place_videos
from vlmrl.data.unusable import UnusableError
from vlmrl.data.video_media import VideoSource, parse_video
from vlmrl.errors import DataError
from vlmrl.video_size import Size, VideoSize

COLUMNS = Columns(video_key="videos", video_min_pixels=64 * 64, video_max_pixels=64 * 96)


class Model:
    """The part of a processor that opening images needs."""

    resize_factor: int | None = 32
    frame_factor: int | None = 2
    resize_settings = "bicubic"
    min_pixels, max_pixels = 1024, 64 * 64

    def num_tokens(self, size: Size) -> int:
        frames = size.num_frames // 2 if isinstance(size, VideoSize) else 1
        return frames * (size[0] // 32) * (size[1] // 32)


def opened(value: Any, columns: Columns = COLUMNS, **access: Any) -> InlineMedia:
    processor: Any = Model()
    source = parse_video(value)
    (media,) = open_row_media([source], processor=processor, columns=columns, access=ImageAccess(**access))
    return media


def size_of(media: InlineMedia) -> VideoSize:
    assert isinstance(media.size, VideoSize)
    assert media.pixels.shape == (media.size.num_frames, media.size.height, media.size.width, 3)
    return media.size


def test_frames_are_those_of_qwen_vl_utils() -> None:
    # 20 frames at 8 per second are 2.5 s: 5 frames at 2 per second, rounded down to an even number.
    size = size_of(opened(video_file(frames_of(20), rate=8)))
    assert size == VideoSize(width=64, height=64, indices=(0, 6, 13, 19), fps=8.0, total=20)
    assert size.sampled_fps == 4 / 20 * 8


def test_frame_limits_bound_the_number_of_frames() -> None:
    content = video_file(frames_of(40), rate=8)
    assert size_of(opened(content, COLUMNS.model_copy(update={"fps_max_frames": 6}))).num_frames == 6
    assert size_of(opened(content, COLUMNS.model_copy(update={"fps": 0.1}))).num_frames == COLUMNS.fps_min_frames


def test_total_pixels_shrink_frames() -> None:
    columns = COLUMNS.model_copy(update={"video_max_pixels": 2**20, "video_min_pixels": 1024})
    content = video_file(frames_of(16, (256, 128)), rate=8)
    assert size_of(opened(content, columns))[:2] == (256, 128)
    # Four frames, of which two count as one: 2 * 64 * 128 pixels in total.
    assert size_of(opened(content, columns.model_copy(update={"video_total_pixels": 2 * 64 * 128})))[:2] == (128, 64)


def test_a_part_of_a_video_is_taken() -> None:
    content = video_file(frames_of(32), rate=8)
    size = size_of(opened({"video": content, "video_start": 1.0, "video_end": 3.0}))
    assert (size.indices[0], size.indices[-1], size.total) == (8, 24, 17)


def test_a_list_of_images_is_a_video(tmp_path: Path) -> None:
    frames = [Image.fromarray(frame) for frame in frames_of(5)]
    for number, frame in enumerate(frames):
        frame.save(tmp_path / f"{number}.png")
    paths = [f"{number}.png" for number in range(5)]
    by_path = opened({"video": paths, "sample_fps": 4}, start=tmp_path, folders=(tmp_path.resolve(),))
    # The last frame is repeated to an even number.
    assert size_of(by_path) == VideoSize(64, 64, (0, 1, 2, 3, 4, 5), 4.0, 6)
    assert np.array_equal(by_path.pixels[4], by_path.pixels[5])
    assert opened({"video": frames, "sample_fps": 4}).hash == by_path.hash
    assert opened(frames).hash != by_path.hash, "times are part of the content"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"video": "a.mp4", "nframes": 8}, "option 'nframes'; read are sample_fps, video_start, video_end"),
        ({"video": [], "sample_fps": 0}, "sample_fps of a video is 0"),
        ({"video": "a.mp4", "video_start": "x"}, "is no number"),
        ({"video": "a.mp4", "sample_fps": 2}, "has sample_fps, but is a file, which has its own rate"),
        ({"video": ["1.png"], "video_end": 2}, "has video_end, but is a list of frames, all of which are taken"),
        (
            {"video": video_file(frames_of(16)), "video_start": 5},
            "(16 frames at 8 per second, 2.0 s) has fewer than two frames from 5 s to the end",
        ),
        (
            {"video": video_file(frames_of(16)), "video_start": 1.5, "video_end": 0.5},
            "has fewer than two frames from 1.5 s to 0.5 s",
        ),
        ([], "a video has no frames"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)], "different sizes: 8x8 and 9x8"),
        ([np.zeros((8, 8, 3), np.uint8)] * 1000, "list of 1000 frames, data.fps_max_frames is 768"),
        ("missing.mp4", "the video is a path, but files are not read here"),
        ("https://example.org/a.mp4", "is on the web: if you trust the dataset, set data.allow_image_urls"),
        (b"\0" * 300 * 2**20, "larger than 256 MiB: raise data.max_video_mib"),
        (7, "int is not a video: give a path"),
        (video_file(frames_of(1)), "too short"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_videos_have_one_clear_line(value: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        opened(value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"video file .*gone\.mp4 does not exist"):
        opened("gone.mp4", start=tmp_path, folders=(tmp_path.resolve(),))
    with pytest.raises(DataError, match=r"video file .* is outside the dataset's folder"):
        opened("/etc/a.mp4", start=tmp_path, folders=(tmp_path.resolve(),))


def test_equal_content_has_an_equal_hash() -> None:
    content = video_file(frames_of(20), rate=8)
    assert opened(content).hash == opened(bytearray(content)).hash
    assert opened(content).hash != opened(video_file(frames_of(20), rate=10)).hash


# ---------------------------------------------------------------- places


def types(messages: Any) -> list[str]:
    return [part.get("text", f"<{part['type']}>") for message in messages for part in message["content"]]


def test_placeholders_mark_the_places_of_images_and_videos() -> None:
    a, b = VideoSource("a.mp4"), VideoSource("b.mp4")
    messages, sources = place_videos("first <video> then <image> and <video>?", ["i.png"], [a, b])
    assert types(messages) == ["first ", "<video>", " then ", "<image>", " and ", "<video>", "?"]
    assert sources == [a, "i.png", b]


def test_videos_that_are_marked_as_images_are_taken_where_a_row_has_no_images() -> None:
    """As in LLaVA-Video's rows."""
    a, b = VideoSource("a.mp4"), VideoSource("b.mp4")
    messages, sources = place_videos([{"role": "user", "content": "<image>\nWhich? <image>"}], [], [a, b])
    assert (types(messages), sources) == (["<video>", "\nWhich? ", "<video>"], [a, b])
    messages, sources = place_videos("<image> and <video>", [], [a])
    assert (types(messages), sources) == (["<image> and ", "<video>"], [a])
    messages, sources = place_videos("What does <image> mean, <image>?", [], [a])
    assert (types(messages), sources) == (["<video>", "What does <image> mean, <image>?"], [a])


def test_without_placeholders_images_come_first_then_videos() -> None:
    a = VideoSource("a.mp4")
    messages, sources = place_videos(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "Which?"}], ["i.png"], [a]
    )
    assert types(messages) == ["s", "<image>", "<video>", "Which?"]
    assert sources == ["i.png", a]


def test_parts_of_messages_hold_videos() -> None:
    part = {"type": "video", "video": "a.mp4", "video_end": 2, "video_start": None}
    content = [part, {"type": "image", "image": "i.png"}, {"type": "text", "text": "?"}]
    messages, sources = read_conversation([{"role": "user", "content": content}])
    assert types(messages) == ["<video>", "<image>", "?"]
    assert sources == (VideoSource("a.mp4", end=2.0), "i.png")


@pytest.mark.parametrize(
    ("value", "videos"),
    [
        ("a.mp4", ["a.mp4"]),
        (["a.mp4", "b.mp4"], ["a.mp4", "b.mp4"]),
        (["1.png", "2.png"], [["1.png", "2.png"]]),
        ([["1.png", "2.png"], "b.mp4"], [["1.png", "2.png"], "b.mp4"]),
        ([{"video": "a.mp4"}], [{"video": "a.mp4"}]),
        ("a.gif", ["a.gif"]),
        (["a.GIF", "b.gif"], ["a.GIF", "b.gif"]),
        (["data:image/gif;base64,R0lG"], ["data:image/gif;base64,R0lG"]),
        ([b"GIF89a..."], [b"GIF89a..."]),
        (None, []),
    ],
)
def test_a_column_holds_one_video_or_several(value: Any, videos: list[Any]) -> None:
    assert list(as_videos(value)) == videos


def gather(question: Any, videos: list[Any], *, model: Any = None, agent: int | None = None, **settings: Any) -> Any:
    columns = Columns(**({"video_key": "videos"} | settings))
    rules = MediaRules(model or Model(), columns, agent)
    return rules.gather(question, [], [], videos)


def _text_model() -> Any:
    model = Model()
    model.frame_factor = None
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gather("<video><video>", ["a.mp4"]), "1 videos, but its question has 2 placeholders"),
        (lambda: gather("what of <video>?", []), "placeholder <video>, but the row has no video: set data.video_key"),
        (lambda: gather("?", ["a.mp4", "b.mp4"]), "2 videos, data.max_videos_per_prompt is 1"),
        (lambda: gather("?", ["a.mp4"], model=_text_model()), "the model takes none"),
        (lambda: gather("?", ["a.mp4"], agent=3), "takes no video yet"),
        (lambda: gather("?", ["a.mp4"], video_key=None), "set data.video_key"),
    ],
)
def test_rows_that_do_not_fit_are_dropped(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnusableError) as caught:
        call()
    assert message in str(caught.value.detail)


def test_the_placeholder_is_text_only_where_the_setting_says_so() -> None:
    assert gather("what of <video>?", [], video_key=None).question == "what of <video>?"
    model: Any = Model()
    with pytest.raises(UnusableError, match="question and videos do not fit") as caught:
        MediaRules(model, Columns(), None).gather("what of <video>?", [], [], [])
    assert "or to none if this is plain text" in str(caught.value.detail)
    model.frame_factor = None  # a model that takes no videos has no such placeholder
    assert MediaRules(model, Columns(), None).gather("<video>?", [], [], []).question == "<video>?"


def open_with(sources: list[Any], columns: Columns = COLUMNS, *, max_tokens: int) -> Any:
    processor: Any = Model()
    return open_row_media(list(map(parse_video, sources)), processor=processor, columns=columns, max_tokens=max_tokens)


def test_a_video_of_too_many_tokens_is_not_decoded() -> None:
    # 4 frames of 64x64 are 2 * 2 * 2 tokens. With this bound on decoding any frame would be too much.
    content = video_file(frames_of(20))
    none = COLUMNS.model_copy(update={"max_video_gpixels": 1e-9})
    with pytest.raises(UnusableError) as caught:
        open_with([content], none, max_tokens=7)
    assert caught.value.kind == "too long"
    assert (
        "takes 8 tokens (4 frames of 64x64), data.max_len is 2048: raise it, or lower data.fps" in caught.value.detail
    )
    with pytest.raises(DataError, match=r"takes too long to decode: .* data\.max_video_gpixels is 1e-09"):
        open_with([content], none, max_tokens=8)
    assert len(open_with([content], max_tokens=8)) == 1
    with pytest.raises(UnusableError, match="too long"):
        open_with([content, content], max_tokens=15)


def test_frames_of_a_list_are_opened_one_by_one() -> None:
    class Frames(list[Any]):
        """The second frame is never looked at: the first shows how many tokens there will be."""

        def __iter__(self) -> Iterator[Any]:
            yield self[0]
            raise AssertionError("opened more than one frame")

    image = np.zeros((64, 64, 3), np.uint8)
    with pytest.raises(UnusableError, match="too long"):
        open_with([{"video": Frames([image] * 4)}], max_tokens=7)


def test_the_pixels_of_a_list_of_frames_have_a_bound_that_is_named() -> None:
    columns = COLUMNS.model_copy(update={"max_row_pixels": 3 * 64 * 64})
    with pytest.raises(DataError, match=r"the 4 frames of a video .* in total: raise data\.max_row_pixels"):
        opened([np.zeros((64, 64, 3), np.uint8)] * 4, columns)
