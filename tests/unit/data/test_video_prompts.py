"""Rows with videos as prompts, supervised samples and pairs; rows with bad videos are dropped with the reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from video_files import frames_of, video_file

from vlmrl import plugins
from vlmrl.config.data import Columns
from vlmrl.config.pairs import PairData
from vlmrl.data.columns import RowRequirements, _looks_like_videos
from vlmrl.data.pairs import PairPrompt, PairStream
from vlmrl.data.prompts import PromptStream
from vlmrl.data.rows import Rows, load_rows
from vlmrl.data.targets import SupervisedPrompt, Targets
from vlmrl.errors import ConfigError, DataError
from vlmrl.models import tiny
from vlmrl.video_size import VideoSize

LIMITS: dict[str, Any] = {
    "video_key": "videos",
    "video_min_pixels": 4096,
    "video_max_pixels": 8192,
    "max_dropped_fraction": 1.0,
}
BAD = {
    "cut.mp4": "is damaged or truncated: Invalid data",
    "long.mp4": "is longer than 600 s",
    "one.mp4": "is too short (1 frames at 8 per second, 0.1 s): two frames are needed",
    "empty.mp4": "is not a readable video (0 bytes)",
    "gone.mp4": "does not exist",
    "/etc/passwd": "is outside the dataset's folder",
    "https://example.org/a.mp4": "is on the web: if you trust the dataset, set data.allow_image_urls",
}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> plugins.Processor:
    model = tiny.build("qwen3_vl", tmp_path_factory.mktemp("model") / "m", size="micro")
    return plugins.processor_of(str(model), Columns())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    noise = video_file(np.random.default_rng(0).integers(0, 255, (16, 48, 64, 3), dtype=np.uint8))
    files = {
        "good.mp4": video_file(frames_of(16)),
        "cut.mp4": noise[: len(noise) // 2],
        "long.mp4": video_file(frames_of(8), rate=0.001),
        "one.mp4": video_file(frames_of(1)),
        "empty.mp4": b"",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def load(folder: Path, *rows: dict[str, Any]) -> Rows:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(str(file), split="train", max_samples=100, seed=0)


def test_bounds_between_which_no_frame_lies_are_refused(processor: plugins.Processor) -> None:
    path = processor.tokenizer.name_or_path
    plugins.processor_of(path, Columns(video_key="videos", video_min_pixels=1, video_max_pixels=1024))
    plugins.processor_of(path, Columns(video_min_pixels=1, video_max_pixels=500))
    with pytest.raises(
        ConfigError, match=r"video_min_pixels 1 and data\.video_max_pixels 500: no frame of whole 32x32"
    ):
        plugins.processor_of(path, Columns(video_key="videos", video_min_pixels=1, video_max_pixels=500))


def test_a_video_is_in_prompt_request_and_messages(folder: Path, processor: plugins.Processor) -> None:
    part = {"type": "video", "video": "good.mp4"}
    rows = load(
        folder,
        {"input": "a <video> b", "videos": ["good.mp4"]},
        {"input": [{"role": "user", "content": [part, {"type": "text", "text": "which?"}]}]},
        {"input": "plain"},
    )
    stream = PromptStream([rows], probs=None, processor=processor, columns=Columns(**LIMITS), seed=0)
    first, second, third = stream.all_prompts(10)
    assert [prompt.messages[0].text for prompt in (first, second, third)] == ["a <video> b", "<video>which?", "plain"]
    assert (first.is_chat, second.is_chat) == (False, True)
    (video,) = first.media
    assert isinstance(video.size, VideoSize)
    assert video.hash == second.media[0].hash
    # 4 frames are two patches in time, of 2x2 tokens each.
    assert (processor.token_types(first.tokens) == 2).sum() == 8
    assert (processor.token_types(first.request) == 2).sum() == 1
    assert third.media == ()


def test_bad_videos_drop_their_rows_and_say_why(
    folder: Path, processor: plugins.Processor, caplog: pytest.LogCaptureFixture
) -> None:
    rows = load(
        folder,
        *({"input": "which?", "videos": [name]} for name in BAD),
        {"input": "which <video>?"},
        {"input": "x", "videos": ["good.mp4"]},
    )
    stream = PromptStream([rows], probs=None, processor=processor, columns=Columns(**LIMITS), seed=0)
    with caplog.at_level(logging.WARNING):
        assert len(stream.all_prompts(20)) == 1
    assert stream.dropped == {"video unusable": len(BAD), "question and videos do not fit": 1}
    lines = [record.getMessage() for record in caplog.records]
    for name, reason in BAD.items():
        assert any(name in line and reason in line for line in lines), (name, lines)


def test_a_dataset_whose_videos_are_not_read_is_refused(folder: Path, processor: plugins.Processor) -> None:
    rows = load(folder, {"input": "which?", "clip": "good.mp4"})
    with pytest.raises(DataError, match=r"videos in column 'clip', which is not read: set data\.video_key to clip"):
        PromptStream([rows], probs=None, processor=processor, columns=Columns(), seed=0)
    with pytest.raises(DataError, match=r"videos in column 'clip', which is not read: set data\.video_key to clip"):
        PromptStream([rows], probs=None, processor=processor, columns=Columns(video_key="videos"), seed=0)
    with pytest.raises(DataError, match=r"no column 'movies' \(data\.video_key\); it has: input, clip"):
        PromptStream([rows], probs=None, processor=processor, columns=Columns(video_key="movies"), seed=0)
    explicit = Columns(video_key="none")
    assert len(PromptStream([rows], probs=None, processor=processor, columns=explicit, seed=0).all_prompts(5)) == 1
    for videos in ([["1.png", "2.png"]], [{"video": ["1.png", "2.png"]}]):
        lists = load(folder, {"input": "which?", "videos": videos})
        with pytest.raises(DataError, match=r"videos in column 'videos', which is not read"):
            PromptStream([lists], probs=None, processor=processor, columns=Columns(), seed=0)
    for video in ("c.gif", ["c.gif", "d.mp4"]):
        named = load(folder, {"input": "which?", "videos": video})
        with pytest.raises(DataError, match=r"set data\.video_key to videos"):
            PromptStream([named], probs=None, processor=processor, columns=Columns(), seed=0)
    other = load(folder, {"input": "which?", "videos": [], "clip": "good.mp4"})
    with pytest.raises(DataError, match=r"videos in column 'clip', .* data\.video_key 'videos' holds none in the rows"):
        PromptStream([other], probs=None, processor=processor, columns=Columns(video_key="videos"), seed=0)
    assert _looks_like_videos("videos", [{"bytes": b"\0\0\0 ftyp", "path": None}]), "as Hub datasets have them"
    assert not _looks_like_videos("prompt", [{"bytes": b"\0\0\0 ftyp", "path": None}])


def test_messages_hold_videos_without_a_column(folder: Path, processor: plugins.Processor) -> None:
    parts = [{"type": "video", "video": "good.mp4"}, {"type": "text", "text": "which?"}]
    rows = load(folder, {"input": [{"role": "user", "content": parts}]})
    stream = PromptStream([rows], probs=None, processor=processor, columns=Columns(**LIMITS), seed=0)
    (prompt,) = stream.all_prompts(5)
    assert [type(media.size) for media in prompt.media] == [VideoSize]


def test_the_digest_of_a_row_covers_its_videos(folder: Path, processor: plugins.Processor) -> None:
    (folder / "other.mp4").write_bytes(video_file(frames_of(12)))
    rows = load(folder, *({"input": "which?", "videos": [name]} for name in ("good.mp4", "other.mp4", "good.mp4")))
    stream = PromptStream([rows], probs=None, processor=processor, columns=Columns(**LIMITS), seed=0)
    (hasher,) = stream.hashers
    first, other, same = (hasher.prompt(row) for row in range(3))
    assert first == same != other


def test_supervised_rows_have_videos_in_several_turns(folder: Path, processor: plugins.Processor) -> None:
    turns = [
        {"role": "user", "content": "<video> which?"},
        {"role": "assistant", "content": "left"},
        {"role": "user", "content": "and here? <video>"},
        {"role": "assistant", "content": "right"},
    ]
    rows = load(folder, {"messages": turns, "videos": ["good.mp4", "good.mp4"]})
    stream = PromptStream(
        [rows],
        probs=None,
        processor=processor,
        columns=Columns(**LIMITS, max_videos_per_prompt=2),
        seed=0,
        requirements=RowRequirements(answer=True, targets=Targets("all")),
    )
    (prompt,) = stream.all_prompts(1)
    assert isinstance(prompt, SupervisedPrompt)
    (sample,) = prompt.samples
    assert len(sample.media) == 2
    assert processor.tokenizer.decode(sample.tokens[sample.sampled]).count("<|im_end|>") == 2


def test_both_responses_of_a_pair_share_a_video(folder: Path, processor: plugins.Processor) -> None:
    rows = load(folder, {"input": "<video> which?", "chosen": "left", "rejected": "right", "videos": "good.mp4"})
    stream = PairStream(
        [rows],
        probs=None,
        processor=processor,
        columns=PairData(**LIMITS, prompt_dataset="d"),
        seed=0,
        requirements=RowRequirements(pair=True),
    )
    (pair,) = stream.all_prompts(1)
    assert isinstance(pair, PairPrompt)
    assert pair.chosen.media[0].hash == pair.rejected.media[0].hash
    assert pair.chosen.shares_prompt


def test_a_column_that_only_names_videos_does_not_stop_a_run(
    folder: Path, processor: plugins.Processor, caplog: pytest.LogCaptureFixture
) -> None:
    rows = load(folder, {"input": "which?", "source": "clips/a.mp4"})
    with caplog.at_level(logging.WARNING):
        stream = PromptStream([rows], probs=None, processor=processor, columns=Columns(), seed=0)
    assert len(stream.all_prompts(5)) == 1
    assert "column 'source' names video files, which are not read (data.video_key)" in caplog.text


def test_the_column_of_one_dataset_needs_the_setting(folder: Path, processor: plugins.Processor) -> None:
    load(folder, {"input": "which?", "clips": "good.mp4"})
    rows = load_rows(f"{folder / 'rows.jsonl'}:video_key=clips", split="train", max_samples=100, seed=0)
    with pytest.raises(
        DataError, match=r"names a column of videos, which is read only with data\.video_key: set it too"
    ):
        PromptStream([rows], probs=None, processor=processor, columns=Columns(), seed=0)
    stream = PromptStream([rows], probs=None, processor=processor, columns=Columns(**LIMITS), seed=0)
    assert len(stream.all_prompts(5)[0].media) == 1


def test_a_video_above_the_longest_prompt_is_too_long(
    folder: Path, processor: plugins.Processor, caplog: pytest.LogCaptureFixture
) -> None:
    rows = load(folder, {"input": "which?", "videos": ["good.mp4"]}, {"input": "which?"})
    stream = PromptStream([rows], probs=None, processor=processor, columns=Columns(**LIMITS, max_len=7), seed=0)
    with caplog.at_level(logging.WARNING), pytest.raises(DataError, match="cannot be used"):
        stream.all_prompts(5)
    assert "good.mp4 takes 8 tokens (4 frames of 64x64), data.max_len is 7" in caplog.text
    assert stream.dropped == {"too long": 2}


@pytest.mark.parametrize("template", [None, "Q: {} A:"])
def test_a_text_without_a_chat_template_has_videos(
    folder: Path, processor: plugins.Processor, template: str | None
) -> None:
    rows = load(
        folder,
        {"input": "a <video> b", "videos": ["good.mp4"]},
        {"input": "c", "videos": ["good.mp4"]},
        {"input": [{"role": "user", "content": "c"}], "videos": ["good.mp4"]},
    )
    plain: dict[str, Any] = {"apply_chat_template": False, "input_template": template}
    stream = PromptStream([rows], probs=None, processor=processor, columns=Columns(**LIMITS, **plain), seed=0)
    first, second = stream.all_prompts(5)
    video = "<|vision_start|><|video_pad|><|vision_end|>"
    around = ("", "") if template is None else ("Q: ", " A:")
    assert first.text == f"{around[0]}a {video} b{around[1]}"
    assert second.text == f"{around[0]}{video}c{around[1]}"
    assert stream.dropped == {"question and images do not fit": 1}
    assert not first.is_chat


def test_the_tokens_of_a_video_are_not_learnt_with_its_text(folder: Path, processor: plugins.Processor) -> None:
    rows = load(folder, {"input": "a <video> b", "videos": ["good.mp4"]})
    plain: dict[str, Any] = {"apply_chat_template": False}
    stream = PromptStream(
        [rows],
        probs=None,
        processor=processor,
        columns=Columns(**LIMITS, **plain),
        seed=0,
        requirements=RowRequirements(targets=Targets("text")),
    )
    (prompt,) = stream.all_prompts(1)
    assert isinstance(prompt, SupervisedPrompt)
    (sample,) = prompt.samples
    # Neither patches nor the times between the frames; the first token has none before it.
    learnt = processor.tokenizer.decode(sample.tokens[sample.sampled])
    assert "seconds" in processor.tokenizer.decode(sample.tokens)
    assert learnt.replace(" ", "") == "b" + processor.tokenizer.decode([processor.eos_token_ids[0]])
