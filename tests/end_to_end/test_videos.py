"""Videos on the real stack: log-probs of engine and trainer agree in every layout, and runs learn from videos."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from vlmrl.data.media import InlineMedia, Noise
from vlmrl.data.packing import make_pack
from vlmrl.errors import DataError
from vlmrl.learning.forward import LogprobForward
from vlmrl.models import tiny
from vlmrl.models.attention import implementation
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.launch import engine_arguments
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Group, Layout, Media, Prompt, Sample, Sampling
from vlmrl.video_size import VideoSize

COLUMNS = Columns(video_key="videos", max_videos_per_prompt=2, max_pixels=200 * 200, fps_max_frames=16)
SAMPLING = Sampling(n=2, temperature=1.0, top_p=1.0, max_new_tokens=8, seed=0)
BLIND = (math.log(6) + math.log(5)) / 3
"""Lowest loss per token without looking: a response is two of six letters, each once, and an end token."""
BLIND_WAY = math.log(2) * 2 / (len("left") + len("right") + 2)
"""Likewise of `drift`: one of two words, of which the first letter decides, and an end token."""
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


def _generate(
    model: Path,
    prompts: list[Prompt],
    *,
    dtype: str = "fp32",
    columns: Columns = COLUMNS,
    max_model_len: int = 640,
    **vllm: Any,
) -> list[Group]:
    engine = RolloutEngine(
        EngineSettings(
            model=str(model),
            vllm=Vllm(cpu_kv_cache_gib=0.25, **vllm),
            columns=columns,
            trust_remote_code=False,
            dtype=dtype,
            max_model_len=max_model_len,
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


@pytest.mark.prove
def test_an_engine_in_bf16_agrees_on_videos_of_a_hybrid_model(tmp_path: Path) -> None:
    """vLLM computes Qwen3.5 on CPU in bf16 only, so the gap is compared with that of other videos."""
    torch.manual_seed(0)
    model = tiny.build("qwen3_5", tmp_path / "model", size="micro")
    processor = plugins.processor_of(str(model), COLUMNS)
    kinds = [("video",), ("video", "image"), ("image", "video", "video"), ()]
    groups = _generate(model, [_prompt(i, processor, k) for i, k in enumerate(kinds)], dtype="bf16")
    net = load_model(str(model), dtype=torch.float32, attn_implementation=implementation("auto", torch.device("cpu")))
    forward = LogprobForward(
        Scorer(net), processor, temperature=1.0, bans=True, device=torch.device("cpu"), cache_bytes=0
    )
    of_videos = {media.hash: media for group in groups for media in group.prompt.media}
    others = {name: Noise(f"other:{name}", media.size) for name, media in of_videos.items()}
    gaps: dict[str, list[float]] = {"same": [], "other": []}
    for name, replaced in (("same", of_videos), ("other", others)):
        for number, group in enumerate(groups):
            for segment in group.segments:
                media = tuple(replaced[item.hash] for item in segment.media)
                sample = Sample(segment.tokens, segment.sampled, media, group=number)
                (_, row), *_ = forward.logprobs([make_pack([sample], range(1), "packed")])
                gaps[name] += np.abs((row - segment.logprobs)[segment.sampled]).tolist()
    # Measured: 0.0029 on average and 0.010 at most; 0.024 and 0.155 with other videos and images.
    assert max(gaps["same"]) < 0.03
    assert np.mean(gaps["same"]) < np.mean(gaps["other"]) / 4


@pytest.mark.prove
def test_an_engine_takes_a_video_of_more_tokens_than_its_usual_step(tmp_path: Path) -> None:
    model = tiny.build("qwen2_5_vl", tmp_path / "model", size="micro")
    columns = COLUMNS.model_copy(update={"max_len": 4000, "fps_max_frames": 40})
    processor = plugins.processor_of(str(model), columns)
    size = VideoSize(14 * 28, 14 * 28, tuple(range(40)), fps=2.0, total=40)
    # vLLM's own largest video has 3,840 here, which it reserves room for in any case.
    assert processor.num_tokens(size) == 3920
    text = processor.render([{"role": "user", "content": [{"type": "video"}]}], num_images=1, columns=columns)
    tokens, request = processor.encode(text, [size])
    prompt = Prompt(0, "test:0", text, tokens, request, label=None, media=(Noise("long", size),))
    (group,) = _generate(model, [prompt], columns=columns, max_model_len=4032)
    assert len(group.rollouts) == SAMPLING.n
    with pytest.raises(DataError, match="vLLM refused the prompt"):
        _generate(model, [prompt], columns=columns, max_model_len=4032, max_num_batched_tokens=2048)


@pytest.mark.prove
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5"])
def test_engines_can_reserve_memory_for_the_largest_video(family: tiny.Family, tmp_path: Path) -> None:
    """As they do when they start on a GPU: vLLM makes a video of the largest size that it knows of."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model = tiny.build(family, tmp_path / "model", size="micro")
    processor = plugins.processor_of(str(model), COLUMNS)
    limits: Any = engine_arguments(vllm=Vllm(), max_images=1, processor=processor, top_p=1.0, columns=COLUMNS)
    arguments: Any = {name: limits[name] for name in ("limit_mm_per_prompt", "mm_processor_kwargs")}
    config = EngineArgs(model=str(model), max_model_len=4096, **arguments).create_model_config()
    made = MULTIMODAL_REGISTRY.create_processor(config)
    counts: Any = made.info.get_mm_max_tokens_per_item(4096, {"image": 1, "video": COLUMNS.max_videos_per_prompt})
    (video, *_) = made.get_dummy_mm_inputs({"video": 1})["mm_placeholders"]["video"]
    assert 0.9 * counts["video"] <= video.get_num_embeds() <= counts["video"]


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
@pytest.mark.parametrize(
    ("options", "blind"), [("families=order&frames=4", BLIND), ("families=drift&frames=2", BLIND_WAY)]
)
def test_a_tiny_model_learns_from_videos(
    options: str, blind: float, tmp_path: Path, tiny_model: Callable[..., str]
) -> None:
    rows = f"visual_motion?{options}&pixels=64&size=16000"
    words = recipe("motion_sft_tiny.yaml", tiny_model("qwen3_vl"), tmp_path / "sft", **{"data.prompt_dataset": rows})
    train_sft(load(SftConfig, words))
    losses = [line["policy/loss"] for line in steps_of(tmp_path / "sft")]
    # No row is drawn twice, so these are losses on new videos.
    assert sum(losses[-10:]) / 10 < blind / 3, losses
