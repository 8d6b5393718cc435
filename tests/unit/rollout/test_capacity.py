"""Limits of an engine, from the demand of the run."""

from typing import Any

from vlmrl.config.data import Columns
from vlmrl.config.videos import most_video_tokens
from vlmrl.rollout.capacity import (
    CPU_LIMITS,
    Demand,
    Limits,
    choose_limits,
    format_limits,
    prompts_at_once,
    video_demand,
)

LARGE = Limits(1024, 16384)
"""vLLM's defaults on an H100."""


def limits(
    demand: Demand | None, upper: Limits = LARGE, *, seqs: int | None = None, tokens: int | None = None
) -> Limits:
    return choose_limits(demand, upper, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def test_the_limits_fit_the_demand() -> None:
    # 512 responses decode a token each while eight prompts of 1,300 tokens are prefilled.
    assert limits(Demand(512, prompts=8, prompt_tokens=1300)) == (512, 512 + 8 * 1300)


def test_the_limits_stay_below_those_of_the_device() -> None:
    assert limits(Demand(4096, prompts=512, prompt_tokens=1300)) == LARGE
    assert limits(Demand(4096, prompts=512, prompt_tokens=1300), CPU_LIMITS) == (128, 2048)
    assert limits(None) == LARGE


def test_a_small_run_has_few_responses_and_a_minimum_of_tokens() -> None:
    assert limits(Demand(16, prompts=4, prompt_tokens=100)) == (16, 2048)
    assert limits(Demand(16, prompts=4, prompt_tokens=100), Limits(128, 1024)) == (16, 1024)


def test_the_users_limit_is_used_and_the_other_fits_it() -> None:
    demand = Demand(512, prompts=8, prompt_tokens=1300)
    assert limits(demand, seqs=64, tokens=4096) == (64, 4096)
    assert limits(demand, seqs=2000) == (2000, 512 + 8 * 1300)
    assert limits(demand, CPU_LIMITS, seqs=4000) == (4000, 4000)
    assert limits(demand, tokens=256) == (256, 256)


def test_an_engine_has_half_its_prompts_at_once_but_at_least_64() -> None:
    assert prompts_at_once(8, 2) == 4
    assert prompts_at_once(128, 1) == 64
    assert prompts_at_once(1024, 2) == 256


def test_limits_are_formatted_in_one_line() -> None:
    assert format_limits(CPU_LIMITS) == "each engine: up to 128 responses and 2048 tokens at once"


class Reader:
    """The part of a processor that the demand of videos needs."""

    frame_factor: int | None = 2
    resize_factor: int | None = 32


def test_a_prompt_has_videos_where_they_are_read_and_the_model_takes_them() -> None:
    reader: Any = Reader()
    assert video_demand(Columns(video_key="videos", max_videos_per_prompt=3), reader) == (3, 2048)
    assert video_demand(Columns(), reader) == (0, 0)
    reader.frame_factor = None
    assert video_demand(Columns(video_key="videos"), reader) == (0, 0)


def test_the_largest_video_has_the_frames_and_pixels_of_the_limits() -> None:
    given: dict[str, Any] = {"video_key": "videos", "max_len": 10**6}
    # 64 frames are 32 pairs of 131,072 / 1024 tokens.
    few = Columns(**given, fps_max_frames=64, video_min_pixels=4096, video_max_pixels=131_072)
    assert most_video_tokens(few, side=32) == 32 * 128
    # All frames together have at most the total, of which half counts.
    assert most_video_tokens(Columns(**given), side=28) == 90_316_800 // 784
    assert most_video_tokens(Columns(video_key="videos"), side=28) == 2048


def test_a_step_has_room_for_the_largest_video() -> None:
    def chosen(video_tokens: int, tokens: int | None = None) -> Limits:
        return choose_limits(
            None, CPU_LIMITS, max_num_seqs=None, max_num_batched_tokens=tokens, video_tokens=video_tokens
        )

    assert chosen(4096) == (128, 4096)
    assert chosen(100) == CPU_LIMITS
    assert chosen(4096, tokens=8000) == (128, 8000)
