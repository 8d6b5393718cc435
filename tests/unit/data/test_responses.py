"""Samples from prompts and responses, and conversations of several segments end to end."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scripted_episodes import make_episode_rollout, make_segment
from scripted_loop import make_prompt

from vlmrl.config.data import Columns
from vlmrl.data.media import Blank
from vlmrl.data.packing import by_response
from vlmrl.data.prompts import PromptStream
from vlmrl.data.responses import EndToEnd, sft_sample, shortened, to_samples
from vlmrl.data.rows import load_rows
from vlmrl.plugins import Processor
from vlmrl.types import Group, Sample, Turn


def test_the_answer_and_its_end_token_are_sampled(vlm: Processor) -> None:
    rows = load_rows("visual_math?families=count&size=3&pixels=112", split="train", max_samples=9, seed=0)
    prompt = PromptStream([rows], probs=None, processor=vlm, columns=Columns(), seed=0).draw(1)[0]
    sample = sft_sample(prompt, "42", vlm)
    num_prompt = len(prompt.tokens)
    assert sample.tokens[:num_prompt].tolist() == prompt.tokens.tolist()
    assert sample.sampled.tolist() == [False] * num_prompt + [True] * 3
    assert sample.tokens[num_prompt:].tolist() == [
        ord("4"),
        ord("2"),
        vlm.tokenizer.convert_tokens_to_ids("<|im_end|>"),
    ]
    assert sample.media == prompt.media


def test_an_answer_cannot_contain_an_image_token(vlm: Processor) -> None:
    rows = load_rows("arithmetic?size=3", split="train", max_samples=9, seed=0)
    prompt = PromptStream([rows], probs=None, processor=vlm, columns=Columns(), seed=0).draw(1)[0]
    sample = sft_sample(prompt, "<|image_pad|><|im_end|>", vlm)
    assert not set(sample.tokens.tolist()) & set(vlm.banned_tokens)
    assert vlm.decode(sample.tokens).endswith("<|image_pad|><|im_end|>")


# ---------------------------------------------------------------- conversations of several segments


def conversations() -> list[Group]:
    """A response of two segments and one of a single segment; then one of two segments."""
    first, second = make_prompt(0), make_prompt(1, length=3)
    return [
        Group(
            first,
            (
                make_episode_rollout(make_segment([[0, 1], [7], [8], [9, 9]]), make_segment([[0, 5, 5], [4]])),
                make_episode_rollout(make_segment([[0, 1], [6, 6]])),
            ),
        ),
        Group(
            second,
            (make_episode_rollout(make_segment([[0, 1, 2], [3]]), make_segment([[0, 3], [3], [2], [2]])),),
        ),
    ]


def test_samples_are_segments_and_know_their_response() -> None:
    samples = to_samples(conversations())
    assert [sample.response for sample in samples] == [0, 0, 1, 2, 2]
    assert [sample.group for sample in samples] == [0, 0, 0, 1, 1]
    assert [sample.length_of_response for sample in samples] == [4, 4, 2, 3, 3]
    assert [sample.shares_prompt for sample in samples] == [True, False, True, True, False]
    assert [sample.prompt_length for sample in samples] == [2, 3, 2, 3, 2]
    assert by_response(samples) == [[0, 1], [2], [3, 4]]
    assert by_response([samples[i] for i in (4, 2, 0, 3, 1)]) == [[0, 3], [1], [2, 4]]


def test_samples_without_a_response_number_are_responses() -> None:
    tokens = np.arange(3)
    assert by_response([Sample(tokens, tokens > 0, response=0), Sample(tokens, tokens > 0)]) == [[0], [1]]


def test_images_of_the_prompt_are_those_of_its_group() -> None:
    dot, line = Blank("dot", (28, 28)), Blank("line", (28, 28))
    prompt = replace(make_prompt(0), media=(dot,))
    first = make_segment([[0, 1], [7], [8], [9]], media=(dot, line))
    rewritten = make_segment([[0, 1, 8], [9]], media=(dot, line, line))
    one, two = to_samples([Group(prompt, (make_episode_rollout(first, rewritten),))])
    assert one.prompt_media == (dot,)
    assert two.prompt_media == (dot, line, line)
    text = make_prompt(1)
    (later,) = to_samples([Group(text, (make_episode_rollout(make_segment([[0, 1], [7], [8], [9]], media=(dot,))),))])
    assert later.prompt_media == ()


def test_a_response_with_another_beginning_shares_no_prompt() -> None:
    dot, line = Blank("dot", (28, 28)), Blank("line", (28, 28))
    prompt = replace(make_prompt(0), media=(dot,))
    segments = (
        make_segment([prompt.tokens.tolist(), [7]], media=(dot,)),
        make_segment([[9, 9, 9], [7]], media=(dot,)),
        make_segment([prompt.tokens.tolist(), [7]], media=(line,)),
    )
    samples = to_samples([Group(prompt, tuple(make_episode_rollout(segment) for segment in segments))])
    assert [sample.shares_prompt for sample in samples] == [True, False, False]


def test_rows_of_segments_lie_end_to_end_and_come_back() -> None:
    samples = to_samples(conversations())
    rows = [np.arange(len(sample.tokens)) + 100 * i for i, sample in enumerate(samples)]
    both = EndToEnd(samples)
    joined = both.join(rows)
    assert [row.tolist() for row in joined] == [
        [0, 1, 2, 3, 4, 5, 100, 101, 102, 103],
        [200, 201, 202, 203],
        [300, 301, 302, 303, 400, 401, 402, 403, 404],
    ]
    padded = [np.pad(row, (0, 10 - len(row)), constant_values=-1) for row in joined]
    assert [row.tolist() for row in both.split(padded)] == [row.tolist() for row in rows]


@given(numbers=st.lists(st.tuples(st.integers(0, 3) | st.none(), st.integers(1, 5)), min_size=1, max_size=8))
def test_split_is_the_inverse_of_join(numbers: list[tuple[int | None, int]]) -> None:
    samples = [Sample(np.arange(n), np.arange(n) > 0, response=number) for number, n in numbers]
    rows = [np.arange(n) + 10 * i for i, (_, n) in enumerate(numbers)]
    both = EndToEnd(samples)
    joined = both.join(rows)
    assert sorted(value for row in joined for value in row) == sorted(value for row in rows for value in row)
    assert [row.tolist() for row in both.split(joined)] == [row.tolist() for row in rows]


def test_a_shortened_conversation_keeps_its_segments_up_to_the_last_sampled_token() -> None:
    rollout = make_episode_rollout(
        make_segment([[0, 1], [7, 7], [8], [9, 9, 9]], [0.5, 1.0]), make_segment([[0, 5]]), finish="length"
    )
    (segment,) = shortened(rollout, 2).segments
    assert segment.tokens.tolist() == [0, 1, 7, 7, 8, 9, 9]
    assert segment.turns == (Turn(2, 4, 0.5), Turn(5, 7, 1.0))
