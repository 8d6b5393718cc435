"""Conversations with images in later turns: values and gradients are those of each sequence alone, in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from micro_models import Picture
from scripted_episodes import failed_rollout, make_episode_rollout
from torch import Tensor

from vlmrl.data.packing import Branch, Pack, collect, make_pack, place
from vlmrl.data.responses import to_samples
from vlmrl.learning.forward import LogprobForward
from vlmrl.learning.layout_check import compare_layouts
from vlmrl.models.attention import PACKED, implementation
from vlmrl.models.inputs import model_inputs
from vlmrl.models.load import freeze
from vlmrl.models.scorer import Scorer
from vlmrl.models.tiny import Family
from vlmrl.models.value_head import ValueModel, value_net
from vlmrl.observe.metrics import Sum
from vlmrl.plugins import Processor
from vlmrl.types import Floats, Group, Layout, Media, Prompt, Sample, Segment, Turn

Make = Callable[..., Any]
OURS = {"": PACKED, "text_config": PACKED, "vision_config": "sdpa"}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VISION: list[Family] = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")


def picture(read: Processor, seed: int, width: int = 2, height: int = 2) -> Picture:
    side = read.resize_factor or 0
    return Picture(seed, (width * side, height * side))


def segment(read: Processor, *spans: str, media: tuple[Media, ...] = ()) -> Segment:
    """A sequence; every second span is a response."""
    sizes = iter([item.size for item in media])
    parts = [read.encode(span, [next(sizes) for _ in range(span.count(IMAGE))])[0] for span in spans]
    tokens = np.concatenate(parts)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    turns = tuple(Turn(ends[k - 1], ends[k]) for k in range(1, len(parts), 2))
    sampled = np.zeros(len(tokens), dtype=np.bool_)
    for turn in turns:
        sampled[turn.start : turn.end] = True
    return Segment(tokens, sampled, np.zeros(len(tokens), np.float32), np.where(sampled, 0, -1), turns, media)


def prompt(read: Processor, index: int, text: str, *media: Media) -> Prompt:
    tokens, request = read.encode(text, [item.size for item in media])
    return Prompt(index, f"steer:{index}", text, tokens, request, None, media)


def conversations(read: Processor) -> list[Group]:
    """A prompt with an image, whose responses see different images in later turns; and prompts without one."""
    start, a, b, c = (picture(read, n, w, h) for n, (w, h) in enumerate([(2, 3), (2, 2), (3, 1), (1, 2)]))
    first = f"go{IMAGE}?"
    rewritten = segment(read, f"go{IMAGE}?left{IMAGE}now", "right!", media=(start, a))
    with_image = Group(
        prompt(read, 0, first, start),
        (
            make_episode_rollout(segment(read, first, "left", f"[{IMAGE}next]", "down.", media=(start, a))),
            make_episode_rollout(
                segment(read, first, "<hm>up", f"[{IMAGE}and{IMAGE}]", "ok", "[so]", "stop", media=(start, b, c))
            ),
            make_episode_rollout(segment(read, first, "<hm>left", media=(start,)), rewritten),
            failed_rollout(prompt(read, 0, first, start)),
            make_episode_rollout(segment(read, first, "u", f"[{IMAGE}]", "v", f"[{IMAGE}]", "w", media=(start, a, a))),
        ),
    )
    text = Group(
        prompt(read, 1, "where?"),
        (
            make_episode_rollout(segment(read, "where?", "here", f"[look {IMAGE}]", "there", media=(b,))),
            make_episode_rollout(segment(read, "where?", "nowhere")),
        ),
    )
    plain = Group(prompt(read, 2, "1+1="), (make_episode_rollout(segment(read, "1+1=", "2", "[no]", "3")),))
    return [with_image, text, plain]


def pack_of(samples: list[Sample], layout: Layout) -> Pack:
    return make_pack(samples, range(len(samples)), layout)


def alone(net: Any, read: Processor, sample: Sample) -> Tensor:
    """[T] log-probs of one sequence by the plain Transformers model; 0 where not sampled."""
    tokens = torch.from_numpy(sample.tokens)[None]
    more: dict[str, Any] = dict(read.pixel_inputs(sample.media)) if sample.media else {}
    if more:
        more["mm_token_type_ids"] = torch.from_numpy(read.token_types(sample.tokens))[None]
    log_p = net(tokens, **more).logits[0, :-1].log_softmax(-1)
    chosen = torch.nn.functional.pad(log_p.gather(1, tokens[0, 1:, None])[:, 0], (1, 0))
    return torch.where(torch.from_numpy(sample.sampled), chosen, 0.0)


def assert_equal_gradients(net: Any, other: Any) -> None:
    for (name, mine), (_, theirs) in zip(net.named_parameters(), other.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            scale = float(theirs.grad.abs().max().clamp(min=1.0))
            # Rounding in the decays of linear attention adds up within a chunk of 64 tokens, padding in front included.
            bound = 1e-4 if "linear_attn" in name else 1e-5
            torch.testing.assert_close(mine.grad, theirs.grad, atol=bound * scale, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", VISION)
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(net: Make, reader: Make, family: Family) -> None:
    read, theirs = reader(family), net(family)
    samples = to_samples(conversations(read))
    weights = [1 + 0.3 * np.random.default_rng(i).standard_normal(len(s.tokens)) for i, s in enumerate(samples)]
    expected = [alone(theirs, read, sample) for sample in samples]
    torch.stack([(row * torch.from_numpy(w)).sum() for row, w in zip(expected, weights, strict=True)]).sum().backward()
    assert max(float(row.detach().abs().max()) for row in expected) > 1
    for layout in LAYOUTS:
        ours = net(family, attention=OURS)
        pack = pack_of(samples, layout)
        out = Scorer(ours)(model_inputs(ours, read, pack))
        for row, other in zip(collect(pack, out.logprobs), expected, strict=True):
            np.testing.assert_allclose(row, other.detach(), atol=2e-5)
        (out.logprobs * place(pack, weights, 0.0)).sum().backward()
        assert_equal_gradients(ours, theirs)


@pytest.mark.parametrize("family", VISION)
def test_one_different_image_in_a_later_turn_changes_only_what_follows_it(
    net: Make, reader: Make, family: Family
) -> None:
    read, model = reader(family), net(family, attention=OURS)
    samples = to_samples(conversations(read))
    other = picture(read, 99)
    changed = [
        replace(sample, media=(sample.media[0], other)) if i == 0 else sample for i, sample in enumerate(samples)
    ]

    def rows(of: list[Sample]) -> list[Floats]:
        pack = pack_of(of, "shared")
        with torch.no_grad():
            return collect(pack, Scorer(model)(model_inputs(model, read, pack)).logprobs)

    before, after = rows(samples), rows(changed)
    for i, (one, two) in enumerate(zip(before, after, strict=True)):
        differs = np.flatnonzero(np.abs(one - two) > 1e-4)
        if i:
            assert not len(differs)
        else:
            second = int(np.flatnonzero(np.diff(samples[0].sampled.astype(int)) == 1)[1]) + 1
            assert len(differs)
            assert differs.min() >= second


def test_the_prompt_is_stored_once_though_images_differ_and_a_history_is_rewritten(reader: Make) -> None:
    read = reader("qwen2_5_vl")
    samples = to_samples(conversations(read))
    pack = pack_of(samples, "shared")
    length = samples[0].prompt_length
    assert pack.rows == (
        (
            Branch((0, 1, 2, 4, 5), length),
            Branch((3,), 0),
            Branch((6, 7), len(b"where?")),
            Branch((8,), 0),
        ),
    )
    assert len(pack.media) == 4


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_are_the_models_own(net: Make, reader: Make, family: Family, layout: Layout) -> None:
    read, model = reader(family), net(family, attention=OURS)
    samples = to_samples(conversations(read))
    pack = pack_of(samples, layout)
    rows = [collect(pack, axis) for axis in model_inputs(model, read, pack)["position_ids"]]
    for i, sample in enumerate(samples):
        grids = read.pixel_inputs(sample.media).get("image_grid_thw") if sample.media else None
        types = torch.from_numpy(read.token_types(sample.tokens))[None]
        tokens = torch.from_numpy(sample.tokens)[None]
        expected, _ = model.base_model.get_rope_index(tokens, types, image_grid_thw=grids)
        assert rows[0][i].tolist() == list(range(len(sample.tokens)))
        assert [rows[axis][i].tolist() for axis in (1, 2, 3)] == expected[:, 0].tolist()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_values_and_their_gradients_are_those_of_each_sequence_alone(
    folder: Make, reader: Make, family: Family
) -> None:
    read = reader(family)
    samples = to_samples(conversations(read))

    def model() -> ValueModel:
        net = value_net(str(folder(family)), dtype=torch.float32, attn_implementation=OURS, head_seed=5)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return ValueModel(net.eval())

    def run(packs: list[Pack]) -> tuple[list[Floats], ValueModel]:
        one, rows = model(), []
        for pack in packs:
            values = one(model_inputs(one.net, read, pack)).values
            sampled = model_inputs(one.net, read, pack)["scored"]
            (torch.where(sampled, values - 0.5, 0.0)).square().sum().backward()
            rows += collect(pack, values)
        return rows, one

    expected, theirs = run([make_pack([sample], [0], "padded") for sample in samples])
    assert np.abs(np.concatenate(expected)).max() > 0.1
    for layout in LAYOUTS:
        rows, ours = run([pack_of(samples, layout)])
        for row, other in zip(rows, expected, strict=True):
            np.testing.assert_allclose(row, other, atol=2e-5)
        for (name, mine), (_, other_weight) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            if mine.grad is None or other_weight.grad is None:
                # Passes without an image leave the tower without a gradient.
                assert mine.grad is None or not mine.grad.any() or "visual" in name
                continue
            scale = float(other_weight.grad.abs().max().clamp(min=1.0))
            torch.testing.assert_close(mine.grad, other_weight.grad, atol=1e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images_of_all_turns_go_through_the_tower_once(net: Make, reader: Make, family: Family) -> None:
    read, model = reader(family), net(family, attention=OURS)
    freeze(model, read, vision=True, projector=True)
    samples = to_samples(conversations(read))

    def forward(cache_bytes: int) -> LogprobForward:
        options: Any = {"device": torch.device("cpu"), "cache_bytes": cache_bytes}
        return LogprobForward(Scorer(model), read, temperature=1.0, bans=True, **options)

    fresh, kept = forward(0), forward(2**30)
    expected = dict(fresh.logprobs([pack_of(samples, "padded")]))
    for number, layout in enumerate(LAYOUTS):
        for pack in ([pack_of(samples, layout)], [make_pack([s], [i], layout) for i, s in enumerate(samples)]):
            for i, row in kept.logprobs(pack):
                np.testing.assert_allclose(row, expected[i], atol=1e-5)
        calls = kept.take_counts()["vision/tower_calls"]
        assert isinstance(calls, Sum)
        assert calls.value == (4 if number == 0 else 0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_check_of_layouts_at_the_start_accepts_conversations(net: Make, reader: Make, family: Family) -> None:
    read = reader(family)
    cpu = torch.device("cpu")
    model = net(family, attention=implementation("auto", cpu))
    samples = [sample for sample in to_samples(conversations(read)) if sample.sampled.any()]
    gaps = compare_layouts(model, read, samples, ["packed", "shared"], attention="auto", device=cpu)
    assert max(max(gap) for gap in gaps.values()) < 1e-5
