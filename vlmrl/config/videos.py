"""Which settings of a run on videos contradict each other, and how many tokens a video may have."""

from __future__ import annotations

from vlmrl.config.data import Columns
from vlmrl.config.reward import Scoring
from vlmrl.config.vllm import Vllm

_SMALLEST_SIDE = 28
"""Side of a token of Qwen2-VL in pixels; that of Qwen3-VL is larger, so that its videos have fewer tokens."""


def most_video_tokens(columns: Columns, *, side: int = _SMALLEST_SIDE) -> int:
    """Return an upper bound on the tokens of a video in a prompt: at most those of a prompt.

    Args:
        side: that of a token, in pixels.
    """
    num_frames = columns.fps_max_frames + columns.fps_max_frames % 2
    within_total = min(columns.video_max_pixels, columns.video_total_pixels / num_frames * 2)
    pixels = int(num_frames / 2 * max(within_total, columns.video_min_pixels * 1.05))
    return min(columns.max_len, -(-pixels // side**2))


def conflicts_of_videos(columns: Columns, *, has_agent: bool, reward: Scoring, vllm: Vllm) -> list[str]:
    if columns.video_key is None:
        return []
    conflicts = []
    if has_agent:
        conflicts.append(
            "data.video_key is set, but conversations with an environment take no videos yet: give rows with images"
        )
    if reward.remote_images == "data":
        conflicts.append(
            "data.video_key is set, but videos are not sent to reward servers yet: set reward.remote_images to hash or "
            "none"
        )
    if columns.video_key == columns.image_key:
        conflicts.append(
            f"data.video_key and data.image_key are both {columns.video_key}, which would be read twice: set the one "
            "that the column does not hold to none"
        )
    tokens, most = vllm.max_num_batched_tokens, most_video_tokens(columns)
    if tokens is not None and tokens < most:
        conflicts.append(
            f"vllm.max_num_batched_tokens {tokens} is below the tokens of the largest video, {most}, which engines "
            "encode in one step: raise it, or lower data.max_len, data.fps_max_frames or data.video_max_pixels"
        )
    return conflicts
