"""Settings of videos: what contradicts, what is not read, and which runs refuse them."""

from typing import Any

import pytest
from config.test_agent import AGENT, evaluation, rl
from config.test_verbs import nest
from pydantic import ValidationError

from vlmrl.config.data import VIDEO_SETTINGS, Columns
from vlmrl.config.verbs import GenerateConfig


@pytest.mark.parametrize("name", VIDEO_SETTINGS)
def test_without_a_column_of_videos_their_settings_are_refused(name: str) -> None:
    value = 2 * Columns.model_fields[name].default
    with pytest.raises(ValidationError, match=rf"data\.{name}.*data\.video_key is none"):
        rl(**{f"data.{name}": value})
    if not name.endswith(("min_frames", "min_pixels")):
        assert getattr(rl(**{f"data.{name}": value, "data.video_key": "videos"}).data, name) == value


def test_none_is_no_column() -> None:
    assert rl(**{"data.video_key": "none"}).data.video_key is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"data.fps_min_frames": 8, "data.fps_max_frames": 6},
            r"data\.fps_min_frames 8 is above data\.fps_max_frames 6",
        ),
        ({"data.video_min_pixels": 9000, "data.video_max_pixels": 8000}, r"data\.video_min_pixels 9000 is above"),
        ({"data.fps_max_frames": 1}, r"greater than or equal to 2"),
    ],
)
def test_limits_that_nothing_fits_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rl(**given, **{"data.video_key": "videos"})


@pytest.mark.parametrize("make", [rl, evaluation])
def test_environments_refuse_videos(make: Any) -> None:
    make(**{"data.video_key": "videos"})
    with pytest.raises(ValidationError, match=r"data\.video_key is set, but conversations with an environment take no"):
        make(**AGENT, **{"data.video_key": "videos"})


def test_generate_refuses_videos() -> None:
    given = {"actor.model_name_or_path": "m", "data.prompt_dataset": "d", "data.video_key": "videos"}
    with pytest.raises(ValidationError, match=r"vlmrl generate writes no videos yet"):
        GenerateConfig.model_validate(nest(given))


def test_reward_servers_get_no_videos() -> None:
    server = {"reward.remote_url": "http://localhost:1", "data.video_key": "videos"}
    rl(**server, **{"reward.remote_images": "hash"})
    with pytest.raises(ValidationError, match=r"videos are not sent to reward servers yet: set reward\.remote_images"):
        rl(**server, **{"reward.remote_images": "data"})


def test_a_column_is_not_read_as_images_and_videos() -> None:
    rl(**{"data.video_key": "media", "data.image_key": "none"})
    with pytest.raises(ValidationError, match=r"data\.video_key and data\.image_key are both media"):
        rl(**{"data.video_key": "media", "data.image_key": "media"})


def test_a_step_of_an_engine_has_room_for_the_largest_video() -> None:
    given = {"data.video_key": "videos", "data.max_len": 8000}
    rl(**given, **{"vllm.max_num_batched_tokens": 8000})
    rl(**given, **{"vllm.max_num_batched_tokens": 7000, "data.video_max_pixels": 104_000, "data.fps_max_frames": 64})
    with pytest.raises(ValidationError, match=r"max_num_batched_tokens 7000 is below the tokens of .* video, 8000"):
        rl(**given, **{"vllm.max_num_batched_tokens": 7000})
