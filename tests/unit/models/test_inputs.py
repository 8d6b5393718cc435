"""Inputs of a model for a pack: positions by hand, attention plans, scored tokens and their states, images."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from vlmrl.data.packing import FILLER, Branch, Pack, collect, make_pack
from vlmrl.errors import ConfigError, DataError
from vlmrl.models.attention import PACKED
from vlmrl.models.attention_plan import Span
from vlmrl.models.inputs import model_inputs, states_at
from vlmrl.models.tiny import Family
from vlmrl.types import Layout, Media, Pixels, Sample

Make = Callable[..., Any]
OURS = {"": PACKED, "text_config": PACKED}
VISION: list[Family] = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Block:
    """56x56 pixels are 4x4 patches of Qwen2.5-VL, and 2x2 tokens."""

    hash: str = "square"
    size: tuple[int, int] = (56, 56)

    def fetch(self) -> Pixels:
        return np.zeros((self.size[1], self.size[0], 3), dtype=np.uint8)


SQUARE, WIDE = Block(), Block("wide", (84, 56))


def text(length: int) -> Sample:
    return Sample(tokens=np.arange(length) + 65, sampled=np.ones(length, dtype=np.bool_))


def responses(
    reader: Make, prompt: str, *texts: str, media: Sequence[Media] = (), family: Family = "qwen2_5_vl", group: int = 0
) -> list[Sample]:
    """Samples of a prompt. Parts in [brackets] come from the environment."""
    samples = []
    for words in texts:
        sizes = iter([item.size for item in media])
        parts = [prompt, *re.findall(r"\[.*?\]|[^\[\]]+", words)]
        tokens = [
            reader(family).encode(part.strip("[]"), [next(sizes) for _ in range(part.count("<|image_pad|>"))])[0]
            for part in parts
        ]
        is_sampled = [n > 0 and not part.startswith("[") for n, part in enumerate(parts)]
        sampled = np.repeat(is_sampled, [len(ids) for ids in tokens])
        samples.append(Sample(np.concatenate(tokens), sampled, tuple(media), group))
    return samples


def pictured(reader: Make) -> Sample:
    """Two letters, an image with its delimiters, and a sampled letter."""
    return responses(reader, f"ab{IMAGE}", "c", media=[SQUARE])[0]


# ---------------------------------------------------------------- positions


def test_position_rows_of_an_image_between_text(net: Make, reader: Make) -> None:
    pack = make_pack([pictured(reader), text(2)], [0, 1], "packed")
    inputs = model_inputs(net("qwen2_5_vl", attention=OURS), reader("qwen2_5_vl"), pack)
    # a b <start>, four image tokens from 3, <end> and c from the largest position + 1; then the next sample.
    assert inputs["position_ids"][:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1],
        [0, 1, 2, 3, 3, 3, 3, 5, 6, 0, 1],
        [0, 1, 2, 3, 3, 4, 4, 5, 6, 0, 1],
        [0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1],
    ]
    assert inputs["mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]]
    assert inputs["use_cache"] is False


def test_each_response_continues_the_positions_of_its_prompt(net: Make, reader: Make) -> None:
    pack = make_pack([*responses(reader, f"ab{IMAGE}", "c", "def", media=[SQUARE]), text(2)], [0, 1, FILLER], "shared")
    inputs = model_inputs(net("qwen2_5_vl", attention=OURS), reader("qwen2_5_vl"), pack)
    # The prompt has 8 tokens, but its largest position is 5: c and d are at 6.
    assert inputs["position_ids"][:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 0, 1],
        [0, 1, 2, 3, 3, 3, 3, 5, 6, 6, 7, 8, 0, 1],
        [0, 1, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 0, 1],
        [0, 1, 2, 3, 4, 3, 4, 5, 6, 6, 7, 8, 0, 1],
    ]
    assert inputs["mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, *[0] * 7]]


def test_responses_continue_from_the_largest_position_not_from_the_last(net: Make, reader: Make) -> None:
    # The prompt ends with 3x2 image tokens from 1: the last row is 2, the last column 3.
    pack = make_pack(responses(reader, "<|vision_start|><|image_pad|>", "b", "cd", media=[WIDE]), [0, 1], "shared")
    inputs = model_inputs(net("qwen2_5_vl", attention=OURS), reader("qwen2_5_vl"), pack)
    assert inputs["position_ids"][:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 7, 8],
        [0, 1, 1, 1, 1, 1, 1, 4, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 4, 5],
    ]


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_every_sample_has_the_models_own_positions(
    net: Make, reader: Make, group: Make, family: Family, layout: Layout
) -> None:
    model, read = net(family, attention=OURS), reader(family)
    samples = [*group(family, 3, 1, (5, 2)), *group(family, 0, 2, (3,)), *group(family, 1, 3, (1, 6, 4))]
    block = Block("b", (2 * read.resize_factor, 3 * read.resize_factor))
    samples += responses(
        reader, f"a{IMAGE}", f"b[{IMAGE}]c", f"d[e{IMAGE}f]", media=[block] * 2, family=family, group=9
    )
    pack = make_pack(samples, range(8), layout)
    positions = model_inputs(model, read, pack)["position_ids"]
    rows = [collect(pack, axis) for axis in positions]
    for i, item in enumerate(samples):
        grids = read.pixel_inputs(item.media).get("image_grid_thw")
        types = torch.from_numpy(read.token_types(item.tokens))[None]
        expected, _ = model.base_model.get_rope_index(torch.from_numpy(item.tokens)[None], types, image_grid_thw=grids)
        assert rows[0][i].tolist() == list(range(len(item.tokens)))
        assert [rows[axis][i].tolist() for axis in (1, 2, 3)] == expected[:, 0].tolist()


@pytest.mark.parametrize(
    ("layout", "row"), [("packed", [0, 1, 2, 0, 1, 2, 3, 0, 1]), ("shared", [0, 1, 2, 2, 3, 0, 1])]
)
def test_a_text_model_gets_one_row_of_positions(net: Make, reader: Make, layout: Layout, row: list[int]) -> None:
    samples = [*responses(reader, "ab", "c", "de", family="qwen3"), text(2)]
    inputs = model_inputs(net("qwen3", attention=OURS), reader("qwen3"), make_pack(samples, [0, 1, FILLER], layout))
    assert inputs["position_ids"].tolist() == [row]
    assert not inputs.keys() & {"mm_token_type_ids", "pixel_values", "attention_mask", "images", "image_places"}


# ---------------------------------------------------------------- attention plans


def test_padded_rows_are_masked_on_the_right(net: Make, reader: Make) -> None:
    inputs = model_inputs(net("qwen3"), reader("qwen3"), make_pack([text(3), text(1)], [0, 1], "padded"))
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert inputs["input_ids"].tolist() == [[65, 66, 67], [65, 256, 256]]
    assert "attention_plan" not in inputs


def test_only_packed_attention_gets_a_plan(net: Make, reader: Make) -> None:
    pack = make_pack([text(3), text(2)], [0, 1], "packed")
    ours = model_inputs(net("qwen3", attention=OURS), reader("qwen3"), pack)
    assert ours["attention_plan"].spans == (Span(0, 3), Span(3, 2))
    assert ours["attention_plan"].causal
    assert "attention_mask" not in ours
    assert "attention_plan" not in model_inputs(net("qwen3"), reader("qwen3"), pack)


def test_the_parent_of_a_response_is_its_prompt(net: Make, reader: Make) -> None:
    samples = [text(2), *responses(reader, "ab", "c", "", "def", family="qwen3", group=1), text(1)]
    pack = make_pack(samples, range(5), "shared")
    inputs = model_inputs(net("qwen3", attention=OURS), reader("qwen3"), pack)
    assert inputs["attention_plan"].spans == (Span(0, 2), Span(2, 2), Span(4, 1, 1), Span(5, 3, 1), Span(8, 1))


def test_padding_behind_a_short_row_is_a_separate_span(net: Make, reader: Make) -> None:
    group = responses(reader, "ab", "c", "d", family="qwen3")
    rows = ((Branch((0, 1), 2),), (Branch((2,), 0), Branch((3,), 0)), (Branch((4,), 0),))
    pack = Pack((*group, text(3), text(4), text(2)), rows, (0, 1, 2, 3, 4))
    inputs = model_inputs(net("qwen3", attention=OURS), reader("qwen3"), pack)
    assert inputs["attention_plan"].spans == (
        *(Span(0, 2), Span(2, 1, 0), Span(3, 1, 0), Span(4, 3)),
        *(Span(7, 3), Span(10, 4)),
        *(Span(14, 2), Span(16, 5)),
    )


def test_a_shared_prompt_needs_packed_attention(net: Make, reader: Make) -> None:
    group = responses(reader, "ab", "c", "d", family="qwen3")
    with pytest.raises(ConfigError, match=r"shared needs an attention .*: set ds\.attn_implementation to auto, or"):
        model_inputs(net("qwen3"), reader("qwen3"), make_pack(group, [0, 1], "shared"))
    # This layout shares nothing.
    model_inputs(net("qwen3"), reader("qwen3"), make_pack([text(3), text(2)], [0, 1], "shared"))


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_recurrent_models_are_not_packed(net: Make, reader: Make, layout: Layout) -> None:
    model = net("qwen3")
    model._is_stateful = True
    model_inputs(model, reader("qwen3"), make_pack([text(3), text(2)], [0, 1], "padded"))
    with pytest.raises(ConfigError, match=r"recurrent layers, would mix: use padded"):
        model_inputs(model, reader("qwen3"), make_pack([text(3), text(2)], [0, 1], layout))


def test_unsupported_layer_types_are_refused(net: Make, reader: Make) -> None:
    for attention in ("sdpa", OURS):
        model = net("qwen3", attention=attention)
        # Transformers counts chunks from the start of a row, which may lie in an earlier sample.
        model.config.layer_types = ["full_attention", "chunked_attention"]
        with pytest.raises(ConfigError, match="layers of chunked_attention"):
            model_inputs(model, reader("qwen3"), make_pack([text(3), text(2)], [0, 1], "packed"))
        with pytest.raises(ConfigError, match="layers of chunked_attention") if attention == OURS else nullcontext():
            model_inputs(model, reader("qwen3"), make_pack([text(3), text(2)], [0, 1], "padded"))


# ---------------------------------------------------------------- scored tokens and their states


def test_only_sampled_tokens_are_scored_and_never_a_first_one(net: Make, reader: Make) -> None:
    half = Sample(tokens=np.arange(3) + 65, sampled=np.array([False, False, True]))
    inputs = model_inputs(net("qwen3"), reader("qwen3"), make_pack([text(2), half], [0, 1], "packed"))
    assert inputs["scored"].tolist() == [[False, True, False, False, True]]
    assert inputs["previous"].tolist() == [0, 3]


def test_the_first_token_of_each_response_is_predicted_by_the_end_of_the_prompt(net: Make, reader: Make) -> None:
    # Indices: a 0, b 1; c 2, d 3; e 4; a sample of three from 5; another prompt 8, 9, 10 and its responses 11 and 12.
    samples = [*responses(reader, "ab", "cd", "e", family="qwen3"), text(3)]
    samples += responses(reader, "xyz", "f", "g", family="qwen3", group=1)
    inputs = model_inputs(
        net("qwen3", attention=OURS), reader("qwen3"), make_pack(samples, [0, 1, FILLER, 3, 4], "shared")
    )
    assert inputs["input_ids"][inputs["scored"]].tolist() == [*map(ord, "cde"), 66, 67, *map(ord, "fg")]
    assert inputs["previous"].tolist() == [1, 2, 1, 5, 6, 10, 10]


def test_states_are_in_the_row_of_their_tokens(net: Make, reader: Make) -> None:
    # Rows of five: a b c | . . and a b d e f.
    samples = responses(reader, "ab", "c", "def", family="qwen3")
    inputs = model_inputs(net("qwen3"), reader("qwen3"), make_pack(samples, [0, 1], "padded"))
    assert inputs["previous"].tolist() == [1, 6, 7, 8]


def test_environment_tokens_are_inputs_and_not_scored(net: Make, reader: Make) -> None:
    samples = responses(reader, "a", "b[cd]e", "f", family="qwen3")
    inputs = model_inputs(net("qwen3", attention=OURS), reader("qwen3"), make_pack(samples, [0, 1], "shared"))
    assert inputs["input_ids"][inputs["scored"]].tolist() == [*map(ord, "bef")]
    assert inputs["previous"].tolist() == [0, 3, 0]


def test_states_at_tokens_have_the_indices_of_the_tokens(reader: Make) -> None:
    # Indices: a 0, b 1; c 2, d 3; e 4; the second response is empty, and ends with the prompt. Then a sample from 5.
    samples = [*responses(reader, "ab", "cd", "", "e", family="qwen3"), text(2)]
    ends = [np.arange(len(s.tokens)) == len(s.tokens) - 1 for s in samples]
    shared = states_at(make_pack(samples, [0, 1, 2, FILLER], "shared"), ends)
    assert shared["scored"].tolist() == [[False, True, False, True, True, False, True]]
    assert shared["previous"].tolist() == [1, 3, 4, 6]
    # Rows of four: a b c d | a b . . | a b e . | x y . .
    padded = states_at(make_pack(samples, range(4), "padded"), ends)
    assert padded["previous"].tolist() == [3, 5, 10, 13]
    # The caller's marks are unchanged.
    assert [end.tolist().index(True) for end in ends] == [3, 1, 2, 1]


def test_several_tokens_of_a_sample_can_be_marked_or_none(reader: Make) -> None:
    samples = responses(reader, "a", "bcd", "ef", family="qwen3")
    marks = [np.array([False, True, False, True]), np.zeros(3, dtype=np.bool_)]
    states = states_at(make_pack(samples, [0, 1], "packed"), marks)
    assert states["previous"].tolist() == [1, 3]
    assert not states_at(make_pack(samples[1:], [1], "packed"), marks[1:])["scored"].any()


# ---------------------------------------------------------------- images


@pytest.mark.parametrize(("layout", "places"), [("packed", 3), ("padded", 3), ("shared", 1)])
def test_a_repeated_image_has_pixels_once(net: Make, reader: Make, layout: Layout, places: int) -> None:
    pack = make_pack(responses(reader, f"ab{IMAGE}", "c", "d", "e", media=[SQUARE]), range(3), layout)
    inputs = model_inputs(net("qwen2_5_vl", attention=OURS), reader("qwen2_5_vl"), pack)
    assert inputs["pixel_values"].shape == (16, 1176)
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert inputs["images"] == ("square",)
    assert inputs["image_places"] == ("square",) * places
    assert (inputs["mm_token_type_ids"] == 1).sum() == 4 * places


def test_image_places_are_in_reading_order_and_pixels_in_order_of_their_names(net: Make, reader: Make) -> None:
    (wide,) = responses(reader, IMAGE, "", media=[WIDE])
    pack = Pack((pictured(reader), wide), rows=((Branch((1,), 0), Branch((0,), 0)),), ids=(0, 1))
    inputs = model_inputs(net("qwen2_5_vl"), reader("qwen2_5_vl"), pack)
    assert inputs["image_places"] == ("wide", "square")
    grids = dict(zip(inputs["images"], inputs["image_grid_thw"].tolist(), strict=True))
    assert grids == {"wide": [1, 4, 6], "square": [1, 4, 4]}


def test_images_within_a_response_have_their_places_there(net: Make, reader: Make) -> None:
    # The prompt has the square; each response then gets the wide image, the second also the square again.
    samples = responses(reader, f"a{IMAGE}", f"b[{IMAGE}]c", f"d[e{IMAGE}]", media=[SQUARE, WIDE])
    pack = make_pack([*samples, pictured(reader)], [0, 1, FILLER], "shared")
    inputs = model_inputs(net("qwen2_5_vl", attention=OURS), reader("qwen2_5_vl"), pack)
    assert pack.rows[0][0] == Branch((0, 1), len("a") + 6)
    assert inputs["images"] == ("square", "wide")
    assert inputs["image_places"] == ("square", "wide", "wide", "square")
    is_image = inputs["mm_token_type_ids"][0]
    assert is_image.tolist() == [0, 0, *[1] * 4, 0, 0, 0, *[1] * 6, 0, 0, 0, 0, 0, *[1] * 6, 0, 0, 0, 0, *[1] * 4, 0, 0]


@pytest.mark.parametrize(
    ("cached", "new"), [({"square"}, ("wide",)), ({"wide", "square"}, ()), ({"other"}, ("square", "wide"))]
)
def test_cached_images_have_no_pixels(net: Make, reader: Make, cached: set[str], new: tuple[str, ...]) -> None:
    (wide,) = responses(reader, IMAGE, "", media=[WIDE])
    pack = make_pack([pictured(reader), wide], [0, FILLER], "shared")
    inputs = model_inputs(net("qwen2_5_vl", attention=OURS), reader("qwen2_5_vl"), pack, cached=cached)
    assert inputs["images"] == new
    assert inputs["image_places"] == ("square", "wide")
    patches = sum({"square": 16, "wide": 24}[name] for name in new)
    assert len(inputs["pixel_values"]) == patches if new else "pixel_values" not in inputs
    # Where the image stands, and what positions it takes, has nothing to do with it.
    fresh = model_inputs(net("qwen2_5_vl", attention=OURS), reader("qwen2_5_vl"), pack)
    for name in ("position_ids", "mm_token_type_ids", "input_ids"):
        assert torch.equal(inputs[name], fresh[name])


@pytest.mark.parametrize(("media", "number"), [([WIDE], "1 images take 6"), ([SQUARE, WIDE], "2 images take 10")])
def test_tokens_that_do_not_fit_the_images_are_refused(
    net: Make, reader: Make, media: list[Media], number: str
) -> None:
    good = pictured(reader)
    bad = Sample(good.tokens, good.sampled, tuple(media), source="charts:3")
    with pytest.raises(DataError, match=f"charts:3 has 4 image tokens, but its {number}: the model would see"):
        model_inputs(net("qwen2_5_vl"), reader("qwen2_5_vl"), make_pack([bad], [0], "packed"))


@pytest.mark.parametrize("family", VISION)
def test_the_grid_of_a_size_is_that_of_the_pixels(reader: Make, sample: Make, family: Family) -> None:
    read = reader(family)
    for seed in range(3):
        media = sample(family, 3, seed).media
        grids = read.pixel_inputs(media)["image_grid_thw"].tolist()
        assert [list(read.grid(item.size)) for item in media] == grids
        assert [read.num_tokens(item.size) for item in media] == [t * h * w // 4 for t, h, w in grids]
