"""What a model is given for a pack: positions by hand, masks, lengths, images once."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from vlmrl.data.packing import Pack, make_pack
from vlmrl.errors import ConfigError
from vlmrl.models.attention import PACKED
from vlmrl.models.inputs import model_inputs
from vlmrl.types import Pixels, Sample

Make = Callable[..., Any]
OURS = {"": PACKED, "text_config": PACKED}


class Square:
    """56x56 pixels: 4x4 patches, 2x2 tokens."""

    hash = "square"
    size = (56, 56)

    def fetch(self) -> Pixels:
        return np.zeros((56, 56, 3), dtype=np.uint8)


def text(length: int) -> Sample:
    return Sample(tokens=np.arange(length) + 65, sampled=np.ones(length, dtype=np.bool_))


def pictured(reader: Make) -> Sample:
    """Two letters, an image between its delimiters, one letter."""
    tokens, _ = reader("qwen2_5_vl").encode("ab<|vision_start|><|image_pad|><|vision_end|>c", [(56, 56)])
    return Sample(tokens=tokens, sampled=np.arange(len(tokens)) >= len(tokens) - 1, media=(Square(),))


def test_position_rows_of_an_image_between_text(net: Make, reader: Make) -> None:
    pack = make_pack([pictured(reader), text(2)], [0, 1], "packed")
    inputs = model_inputs(net("qwen2_5_vl", attention=OURS), reader("qwen2_5_vl"), pack)
    # a b <start>, four image tokens that begin at 3, <end> and c from the largest position + 1; then the next sample.
    assert inputs["position_ids"][:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1],
        [0, 1, 2, 3, 3, 3, 3, 5, 6, 0, 1],
        [0, 1, 2, 3, 3, 4, 4, 5, 6, 0, 1],
        [0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1],
    ]
    assert inputs["mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]]
    assert inputs["use_cache"] is False


def test_a_text_model_gets_one_row_of_positions(net: Make, reader: Make) -> None:
    inputs = model_inputs(net("qwen3"), reader("qwen3"), make_pack([text(3), text(2)], [0, 1], "packed"))
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert not inputs.keys() & {"mm_token_type_ids", "pixel_values", "attention_mask", "image_occurrences"}


def test_padded_rows_are_masked_on_the_right(net: Make, reader: Make) -> None:
    inputs = model_inputs(net("qwen3"), reader("qwen3"), make_pack([text(3), text(1)], [0, 1], "padded"))
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert inputs["input_ids"].tolist() == [[65, 66, 67], [65, 256, 256]]


def test_lengths_go_only_to_attention_that_reads_them(net: Make, reader: Make) -> None:
    pack = make_pack([text(3), text(2)], [0, 1], "packed")
    ours = model_inputs(net("qwen3", attention=OURS), reader("qwen3"), pack)
    assert ours["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert ours["max_length_q"] == 3
    assert "cu_seq_lens_q" not in model_inputs(net("qwen3"), reader("qwen3"), pack)


def test_padding_behind_a_short_row_is_a_sample_of_its_own(net: Make, reader: Make) -> None:
    pack = Pack((text(3), text(2), text(2)), rows=((0, 1), (2,)), ids=(0, 1, 2))
    inputs = model_inputs(net("qwen3", attention=OURS), reader("qwen3"), pack)
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 5, 7, 10]


def test_only_sampled_tokens_are_scored_and_never_a_first_one(net: Make, reader: Make) -> None:
    half = Sample(tokens=np.arange(3) + 65, sampled=np.array([False, False, True]))
    inputs = model_inputs(net("qwen3"), reader("qwen3"), make_pack([text(2), half], [0, 1], "packed"))
    assert inputs["scored"].tolist() == [[False, True, False, False, True]]


def test_recurrent_models_are_not_packed(net: Make, reader: Make) -> None:
    model = net("qwen3")
    model._is_stateful = True
    model_inputs(model, reader("qwen3"), make_pack([text(3), text(2)], [0, 1], "padded"))
    with pytest.raises(ConfigError, match=r"recurrent layers, would mix: use padded"):
        model_inputs(model, reader("qwen3"), make_pack([text(3), text(2)], [0, 1], "packed"))


def test_layers_that_our_attention_does_not_know_are_refused(net: Make, reader: Make) -> None:
    pack = make_pack([text(3), text(2)], [0, 1], "packed")
    for attention in ("sdpa", OURS):
        model = net("qwen3", attention=attention)
        model.config.layer_types = ["full_attention", "chunked_attention"]
        with pytest.raises(ConfigError, match="layers of chunked_attention") if attention == OURS else nullcontext():
            model_inputs(model, reader("qwen3"), pack)


def test_an_image_that_occurs_twice_is_carried_once(net: Make, reader: Make) -> None:
    one = pictured(reader)
    pack = make_pack([one, text(2), one], [0, 1, 2], "packed")
    inputs = model_inputs(net("qwen2_5_vl"), reader("qwen2_5_vl"), pack)
    assert inputs["pixel_values"].shape == (16, 1176)
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert inputs["image_occurrences"].tolist() == [0, 0]


def test_images_are_in_the_order_of_the_rows(net: Make, reader: Make) -> None:
    class Wide(Square):
        hash = "wide"
        size = (84, 56)

        def fetch(self) -> Pixels:
            return np.zeros((56, 84, 3), dtype=np.uint8)

    tokens, _ = reader("qwen2_5_vl").encode("<|vision_start|><|image_pad|><|vision_end|>", [(84, 56)])
    wide = Sample(tokens=tokens, sampled=np.zeros(len(tokens), dtype=np.bool_), media=(Wide(),))
    pack = Pack((pictured(reader), wide), rows=((1, 0),), ids=(0, 1))
    inputs = model_inputs(net("qwen2_5_vl"), reader("qwen2_5_vl"), pack)
    assert inputs["image_grid_thw"][inputs["image_occurrences"]].tolist() == [[1, 4, 6], [1, 4, 4]]
