"""Samples of supervised training: one or all responses of a conversation, whole texts, and rows that are too long."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
from chat_templates import TEMPLATES
from chat_templates import text_processor as make_text_processor
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.columns import RowRequirements
from vlmrl.data.prompts import PromptStream
from vlmrl.data.responses import sft_sample
from vlmrl.data.rows import Rows
from vlmrl.data.targets import SupervisedPrompt, Targets, join_turns, supervise, truncate
from vlmrl.plugins import Processor
from vlmrl.types import Sample

text_processor = cache(make_text_processor)
ROLES = ("user", "assistant")
THOUGHT = "<think>\nlet me see\n</think>\n\n"


def chat(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ROLES[place % 2], "content": text} for place, text in enumerate(texts)]


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def stream(
    rows: Sequence[dict[str, Any]], processor: Processor, *, kind: Any = "last", truncates: bool = False, **columns: Any
) -> PromptStream:
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    return PromptStream(
        [Rows("rows", list(rows), names)],
        probs=None,
        processor=processor,
        columns=Columns(**({"max_dropped_fraction": 1.0} | columns)),
        seed=0,
        requirements=RowRequirements(answer=kind != "text", targets=Targets(kind, truncates)),
    )


def samples_of(row: dict[str, Any], processor: Processor, **options: Any) -> tuple[Sample, ...]:
    (prompt,) = stream([row], processor, **options).draw(1)
    assert isinstance(prompt, SupervisedPrompt)
    return prompt.samples


def refusal(row: dict[str, Any], processor: Processor, **options: Any) -> tuple[str, str]:
    """The kind and the reason for which a row is dropped; another one is not."""
    good = {"messages": chat("?", "4")}
    rows = stream([row, good], processor, **options)
    assert [prompt.source for prompt in rows.draw(2)] == ["rows:1", "rows:1"]
    ((kind, _),) = rows.dropped.items()
    return kind, rows._last_dropped


def spans(sample: Sample, processor: Processor) -> list[str]:
    """Texts of the runs of sampled tokens, control tokens included."""
    edges = np.flatnonzero(np.diff(np.pad(sample.sampled.astype(int), 1)))
    return [
        processor.tokenizer.decode(sample.tokens[start:end].tolist(), clean_up_tokenization_spaces=False)
        for start, end in edges.reshape(-1, 2)
    ]


def end_of(processor: Processor) -> str:
    return str(processor.tokenizer.decode([processor.eos_token_ids[0]]))


def context(sample: Sample, processor: Processor) -> str:
    """The text before the first sampled token."""
    return str(processor.tokenizer.decode(sample.tokens[: sample.prompt_length].tolist()))


# ---------------------------------------------------------------- all responses


@pytest.mark.parametrize("style", TEMPLATES)
def test_the_spans_of_every_family_are_the_responses_with_their_end_token(style: str) -> None:
    processor = text_processor(style)
    row = {"messages": chat("2 + 2?", "it is 4", "and 3 + 3?", "it is 6", "sure?", "the answer\n\nis 6")}
    samples = samples_of(row, processor, kind="all")
    end = end_of(processor)
    expected = [f"it is 4{end}", f"it is 6{end}", f"the answer\n\nis 6{end}"]
    assert [span for sample in samples for span in spans(sample, processor)] == expected
    if style != "thinking":  # its prompts end inside the thinking, which its history does not have
        (sample,) = samples
        assert sample.response is None
        assert sample.shares_prompt


@pytest.mark.parametrize("style", TEMPLATES)
def test_the_last_response_alone_follows_the_history_as_rendered(style: str) -> None:
    processor = text_processor(style)
    messages = chat("2 + 2?", "it is 4", "and 3 + 3?", "it is 6")
    (sample,) = samples_of({"messages": messages}, processor)
    assert spans(sample, processor) == [f"it is 6{end_of(processor)}"]
    rendered = processor.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert context(sample, processor) == rendered


def test_thinking_that_the_template_removes_makes_segments() -> None:
    processor = text_processor("qwen3")
    row = {"messages": chat("2 + 2?", f"{THOUGHT}4", "3 + 3?", f"{THOUGHT}6", "4 + 4?", "8", "5 + 5?", "10")}
    first, second, third = samples_of(row, processor, kind="all")
    assert spans(first, processor) == [f"{THOUGHT}4<|im_end|>"]
    assert spans(second, processor) == [f"{THOUGHT}6<|im_end|>"]
    assert spans(third, processor) == ["8<|im_end|>", "10<|im_end|>"]
    assert "let me see" not in context(second, processor)
    assert "let me see" not in context(third, processor)
    assert [sample.response for sample in (first, second, third)] == [0, 0, 0]
    assert [sample.shares_prompt for sample in (first, second, third)] == [True, False, False]
    lengths = [int(sample.sampled.sum()) for sample in (first, second, third)]
    assert {sample.length_of_response for sample in (first, second, third)} == {sum(lengths)}


@pytest.mark.parametrize("form", ["messages", "conversations", "columns", "json"])
def test_all_forms_of_a_conversation_give_the_same_samples(form: str, text_model: Processor) -> None:
    messages = chat("2 + 2?", "it is 4", "and 3 + 3?", "it is 6")
    sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in messages]
    row = {
        "messages": {"messages": messages},
        "conversations": {"conversations": sharegpt},
        "columns": {"input": messages[:-1], "answer": "it is 6"},
        "json": {"input": json.dumps(messages)},
    }[form]
    (sample,) = samples_of(row, text_model, kind="all")
    assert spans(sample, text_model) == ["it is 4<|im_end|>", "it is 6<|im_end|>"]
    (last,) = samples_of(row, text_model)
    assert last.tokens.tolist() == sample.tokens.tolist()


def test_images_of_later_turns_lie_where_they_are_named(vlm: Processor) -> None:
    images = [picture(seed) for seed in range(3)]
    row = {
        "messages": chat("<image>What?", "a dot", "And <image> and <image>?", "two lines"),
        "images": images,
    }
    (sample,) = samples_of(row, vlm, kind="all")
    assert spans(sample, vlm) == ["a dot<|im_end|>", "two lines<|im_end|>"]
    assert len(sample.media) == 3
    assert len(sample.prompt_media) == 1
    first_span = sample.prompt_length
    types = vlm.token_types(sample.tokens)
    per_image = vlm.num_tokens(sample.media[0].size)
    assert types[:first_span].sum() == per_image
    assert types.sum() == 3 * per_image


def test_inline_images_of_openai_parts_lie_in_any_turn(vlm: Processor) -> None:
    image = {"type": "image", "image": picture(0)}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "user", "content": [image, {"type": "text", "text": "What?"}, image | {"image": picture(1)}]},
        {"role": "assistant", "content": "a dot"},
    ]
    (sample,) = samples_of({"messages": messages}, vlm, kind="all")
    assert spans(sample, vlm) == ["Hi<|im_end|>", "a dot<|im_end|>"]
    assert len(sample.media) == 2
    assert sample.prompt_media == ()


_SAFE_TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1, max_size=20).filter(
    lambda text: bool(text.strip()) and normalize("NFC", text) == text
)


@settings(max_examples=15, deadline=None)
@given(
    style=st.sampled_from(sorted(TEMPLATES)),
    turns=st.lists(st.tuples(_SAFE_TEXT, st.booleans(), _SAFE_TEXT), min_size=1, max_size=4),
)
def test_every_response_is_learned_once_after_what_the_template_renders(
    style: str, turns: list[tuple[str, bool, str]]
) -> None:
    processor = text_processor(style)
    responses = [(THOUGHT if thinks else "") + response for _, thinks, response in turns]
    messages = chat(*(text for (question, _, _), response in zip(turns, responses, strict=True)
                      for text in (question, response)))  # fmt: skip
    samples = samples_of({"messages": messages}, processor, kind="all", max_len=100_000)
    learned = [span for sample in samples for span in spans(sample, processor)]
    assert learned == [f"{response}{end_of(processor)}" for response in responses]
    for sample in samples:
        assert not sample.sampled[0]
        assert sample.sampled[-1]
    (last,) = samples_of({"messages": messages}, processor, max_len=100_000)
    assert samples[-1].tokens.tolist() == last.tokens.tolist()


# ---------------------------------------------------------------- bad rows


@pytest.mark.parametrize(
    ("messages", "kind", "reason"),
    [
        (chat("a", "b")[::-1] + chat("a", "b"), "roles in a wrong order", "message 1, of the assistant, has no que"),
        ([*chat("a", "b"), *chat("c", "d")[1:]], "roles in a wrong order", "message 3, of the assistant, follows"),
        (
            [*chat("a", "b"), {"role": "system", "content": "s"}, *chat("c", "d")],
            "roles in a wrong order",
            "message 3 has the role system, which belongs before all others",
        ),
        ([{"role": "tool", "content": "t"}, *chat("a", "b")], "roles in a wrong order", "follows no message of the as"),
        (chat("a", "b", "c"), "no answer", "it has no final assistant message"),
        (chat("a", ""), "no answer", "the response is empty"),
        (chat("a", " \n"), "no answer", "the response is empty"),
        (chat("a", "", "c", "d"), "response unusable", "message 2, of the assistant, is empty"),
        (
            [*chat("a"), {"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "b"}]}],
            "no answer",
            "parts other than text",
        ),
        (
            [*chat("a"), {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
            "no answer",
            "the answer has tool_calls, which is not trained on",
        ),
        (
            [*chat("a"), {"role": "assistant", "content": "b", "reasoning_content": "r"}, *chat("c", "d")],
            "response unusable",
            "the answer has reasoning_content, which is not trained on",
        ),
        ([{"role": "user", "content": [{"type": "audio"}]}, *chat("", "b")[1:]], "question unusable", "type 'audio'"),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_be_learned_is_dropped(
    messages: list[dict[str, Any]], kind: str, reason: str, text_model: Processor
) -> None:
    found_kind, detail = refusal({"messages": messages}, text_model, kind="all")
    assert found_kind == kind
    assert reason in detail


def test_an_empty_final_message_is_not_replaced_by_the_label(text_model: Processor) -> None:
    assert refusal({"messages": chat("a", ""), "label": "b"}, text_model)[1] == "rows:0 (the response is empty)"


def test_a_response_with_a_placeholder_is_dropped_where_the_row_has_images(vlm: Processor) -> None:
    seen = {"role": "user", "content": [{"type": "image", "image": picture(0)}, {"type": "text", "text": "What?"}]}
    kind, detail = refusal({"messages": [seen, {"role": "assistant", "content": "<image> red"}]}, vlm)
    assert kind == "response unusable"
    assert "the response has the placeholder <image>" in detail
    assert samples_of({"messages": chat("Name a tag", "<image>")}, vlm, image_key=None)


# ---------------------------------------------------------------- longest rows


def test_a_row_counts_with_its_response(text_model: Processor) -> None:
    row = {"input": "2 + 2?", "answer": "four"}
    (sample,) = samples_of(row, text_model)
    length = len(sample.tokens)
    assert len(samples_of(row, text_model, max_len=length)) == 1
    rows = [row, {"input": "2?", "answer": "4"}]
    dropped = stream(rows, text_model, max_len=length - 1)
    assert [prompt.source for prompt in dropped.draw(2)] == ["rows:1", "rows:1"]
    assert dropped.dropped == {"too long": 1}


def test_a_cut_row_keeps_what_it_learns_within_the_limit(text_model: Processor) -> None:
    row = {"messages": chat("2 + 2?", "four", "and 3 + 3?", "six or so")}
    (whole,) = samples_of(row, text_model, kind="all")
    (prompt,) = stream([row], text_model, kind="all", truncates=True, max_len=len(whole.tokens) - 3).draw(1)
    assert isinstance(prompt, SupervisedPrompt)
    assert prompt.is_cut
    (cut,) = prompt.samples
    assert cut.tokens.tolist() == whole.tokens[:-3].tolist()
    assert spans(cut, text_model) == ["four<|im_end|>", "six or "]
    first_end = whole.prompt_length + len("four") + 1
    (cut,) = samples_of(row, text_model, kind="all", truncates=True, max_len=first_end + 5)
    assert spans(cut, text_model) == ["four<|im_end|>"]
    assert len(cut.tokens) == first_end
    assert refusal(row, text_model, kind="all", truncates=True, max_len=whole.prompt_length)[0] == "too long"


def test_a_cut_leaves_no_part_of_an_image(vlm: Processor) -> None:
    row = {
        "messages": chat("<image>What?", "a dot", "And <image>?", "a line"),
        "images": [picture(0), picture(1)],
    }
    (whole,) = samples_of(row, vlm, kind="all")
    first_image_end = int(np.flatnonzero(vlm.token_types(whole.tokens))[vlm.num_tokens(whole.media[0].size) - 1])
    seen = set()
    for limit in range(first_image_end + 20, len(whole.tokens)):
        cut = truncate(whole, limit, vlm)
        if cut is None:
            continue
        seen.add(len(cut.media))
        sizes = [vlm.num_tokens(item.size) for item in cut.media]
        assert vlm.token_types(cut.tokens).sum() == sum(sizes)
        assert cut.sampled[-1]
        assert len(cut.tokens) <= limit
    assert seen == {1, 2}


# ---------------------------------------------------------------- whole texts


def test_a_text_is_learned_from_its_second_token_to_its_end(text_model: Processor) -> None:
    (sample,) = samples_of({"input": "once"}, text_model, kind="text", apply_chat_template=False)
    assert text_model.tokenizer.decode(sample.tokens) == f"once{end_of(text_model)}"
    assert sample.sampled.tolist() == [False, True, True, True, True]


def test_images_of_a_text_are_not_learned(vlm: Processor) -> None:
    row = {"input": "A <image> dot", "images": [picture(0)]}
    (sample,) = samples_of(row, vlm, kind="text", apply_chat_template=False)
    assert spans(sample, vlm) == [" ", " dot<|im_end|>"]
    assert len(sample.media) == 1


def test_a_conversation_is_no_text(text_model: Processor) -> None:
    rows = stream([{"input": chat("a", "b")}, {"input": "c"}], text_model, kind="text", apply_chat_template=False)
    rows.draw(2)  # each row once, and one again
    assert rows.dropped == {"question unusable": 1}


# ---------------------------------------------------------------- joining


def test_turns_are_joined_where_one_continues_the_other() -> None:
    def turn(tokens: list[int], prompt: int) -> Sample:
        return Sample(np.array(tokens), np.arange(len(tokens)) >= prompt)

    (joined,) = join_turns([turn([5, 6, 7, 2], 2), turn([5, 6, 7, 2, 8, 9, 2], 5)])
    assert joined.tokens.tolist() == [5, 6, 7, 2, 8, 9, 2]
    assert joined.sampled.tolist() == [False, False, True, True, False, True, True]
    apart = join_turns([turn([5, 6, 7, 2], 2), turn([5, 6, 2, 8, 9, 2], 4)])
    assert [sample.tokens.tolist() for sample in apart] == [[5, 6, 7, 2], [5, 6, 2, 8, 9, 2]]


def test_a_single_response_is_what_it_was_before(text_model: Processor) -> None:
    (prompt,) = stream([{"input": "2 + 2?", "answer": "4"}], text_model).draw(1)
    (sample,) = supervise(prompt, Targets(), processor=text_model, columns=Columns()).samples
    assert sample.tokens.tolist() == sft_sample(prompt, "4", text_model).tokens.tolist()
