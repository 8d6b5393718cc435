"""Videos on the real stack: log-probs of engine and trainer agree in every layout, and runs learn from videos."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_pair import EXACT
from recipes import recipe, steps_of

from vlmrl import plugins
from vlmrl.commands.rl import train_rl
from vlmrl.commands.sft import train_sft
from vlmrl.config.data import Columns
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.config.vllm import Vllm
from vlmrl.data.media import InlineMedia
from vlmrl.data.packing import make_pack
from vlmrl.learning.forward import LogprobForward
from vlmrl.models import tiny
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Group, Layout, Media, Prompt, Sample, Sampling
from vlmrl.video_size import VideoSize

COLUMNS = Columns(video_key="videos", max_videos_per_prompt=2, max_pixels=200 * 200, fps_max_frames=16)
SAMPLING = Sampling(n=2, temperature=1.0, top_p=1.0, max_new_tokens=8, seed=0)
BLIND = (math.log(6) + math.log(5)) / 3
"""Lowest loss per token without looking: a response is two of six letters, each once, and an end token."""
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")


def _media(index: int, kind: str, factor: int) -> Media:
    """Noise; a video of 12 frames is longer than it is wide or high in tokens, where families count positions apart."""
    rng = np.random.default_rng(index)
    width, height = factor * 2, factor * 2
    if kind == "image":
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        return InlineMedia(f"image{index}", (width, height), pixels)
    height = factor * (1 + index % 2)
    size = VideoSize(width, height, tuple(range(0, 36, 3)), fps=7.0 + index, total=36)
    return InlineMedia(f"video{index}", size, rng.integers(0, 255, (12, height, width, 3), dtype=np.uint8))


def _prompt(index: int, processor: plugins.Processor, kinds: tuple[str, ...]) -> Prompt:
    assert processor.resize_factor is not None
    media = tuple(_media(10 * index + n, kind, processor.resize_factor) for n, kind in enumerate(kinds))
    parts = [{"type": kind} for kind in kinds] + [{"type": "text", "text": "which way?"}]
    text = processor.render([{"role": "user", "content": parts}], num_images=len(media), columns=COLUMNS)
    tokens, request = processor.encode(text, [item.size for item in media])
    return Prompt(index, f"test:{index}", text, tokens, request, label=None, media=media)


def _generate(model: Path, prompts: list[Prompt]) -> list[Group]:
    engine = RolloutEngine(
        EngineSettings(
            model=str(model),
            vllm=Vllm(cpu_kv_cache_gib=0.25),
            columns=COLUMNS,
            trust_remote_code=False,
            dtype="fp32",
            max_model_len=640,
            top_p=1.0,
            name="engine-0",
            adapter=None,
            temperature=None,
        )
    )

    async def play() -> list[Group]:
        await engine.start()
        try:
            return list(await asyncio.gather(*(engine.generate(prompt, SAMPLING) for prompt in prompts)))
        finally:
            await engine.shutdown()

    return asyncio.run(play())


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(family, marks=pytest.mark.prove) for family in ("qwen2_5_vl", "qwen2_vl"))]
)
def test_engine_and_trainer_agree_on_videos_in_every_layout(family: tiny.Family, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny.build(family, tmp_path / "model", size="micro")
    processor = plugins.processor_of(str(model), COLUMNS)
    kinds = [("video",), (), ("video", "image"), ("image", "video", "video")]
    groups = _generate(model, [_prompt(i, processor, k) for i, k in enumerate(kinds)])

    net = load_model(str(model), dtype=torch.float32, attn_implementation=implementation("auto", torch.device("cpu")))
    forward = LogprobForward(
        Scorer(net), processor, temperature=1.0, bans=True, device=torch.device("cpu"), cache_bytes=0
    )
    segments = [segment for group in groups for segment in group.segments]
    samples = [
        Sample(segment.tokens, segment.sampled, segment.media, group=number)
        for number, group in enumerate(groups)
        for segment in group.segments
    ]
    assert not np.isin(np.concatenate([s.tokens[s.sampled] for s in segments]), processor.banned_tokens).any()
    for layout in LAYOUTS:
        rows = dict(forward.logprobs([make_pack(samples, range(len(samples)), layout)]))
        for i, segment in enumerate(segments):
            assert np.abs((rows[i] - segment.logprobs)[segment.sampled]).max() < EXACT, (layout, i)


@pytest.mark.usefixtures("ray_session")
def test_a_run_on_video_files(tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str) -> None:
    data = "visual_motion?frames=4&pixels=64&encoded=true"
    flags = {
        "data.prompt_dataset": f"{data}&size=64,visual_math?families=count&pixels=64&size=64",
        "eval.dataset": f"{data}&size=4",
        "reward.functions": "{}",
        "reward.remote_url": digits_reward,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 16,
        "train.max_steps": 2,
    }
    train_rl(
        load(RlConfig, recipe("motion_tiny.yaml", tiny_model("qwen3_vl", size="micro"), tmp_path / "run", **flags))
    )
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    assert all(line["sync/logprob_diff_max"] < 1e-3 for line in steps)
    assert steps[0]["verify/images/engine_effect"] > 1e-5
    assert steps[0]["data/rows_dropped"] == 0
    assert list((tmp_path / "run" / "rollouts" / "media").glob("*.png")), "videos are shown as sheets of frames"


@pytest.mark.prove
@pytest.mark.usefixtures("ray_session")
def test_a_tiny_model_learns_from_videos(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    train_sft(load(SftConfig, recipe("motion_sft_tiny.yaml", tiny_model("qwen3_vl"), tmp_path / "sft")))
    losses = [line["policy/loss"] for line in steps_of(tmp_path / "sft")]
    # No row is drawn twice, so these are losses on new videos.
    assert sum(losses[-10:]) / 10 < BLIND / 3, losses
