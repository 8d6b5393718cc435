from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from prompt_streams import IMAGE, rows

from vlmrl.config.pairs import PairData
from vlmrl.config.rollout import EvalRows
from vlmrl.data.columns import RowRequirements
from vlmrl.data.packing import make_pack
from vlmrl.data.pairs import Pairs, PairStream, collate_pairs
from vlmrl.data.source import Source
from vlmrl.errors import DataError
from vlmrl.models import tiny
from vlmrl.plugins import Processor

OTHER = Image.new("RGB", (56, 56), "blue")
PAIR = RowRequirements(pair=True)


def stream(*content: Mapping[str, Any], processor: Processor, **settings: Any) -> PairStream:
    settings = {"prompt_dataset": "mine", "max_dropped_fraction": 0.9} | settings
    columns = PairData.model_validate(settings)
    return PairStream([rows(content)], probs=None, processor=processor, columns=columns, seed=0, requirements=PAIR)


def draw(*content: Mapping[str, Any], processor: Processor, **settings: Any) -> Pairs:
    return collate_pairs(stream(*content, processor=processor, **settings).all_prompts(len(content)))


def asked(text: Any, response: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": response}]


def with_image(image: Any, response: str) -> list[dict[str, Any]]:
    return asked([{"type": "image", "image": image}, {"type": "text", "text": "what?"}], response)


def test_samples_are_numbered_by_pair_and_response(text_model: Processor) -> None:
    content = [{"input": f"{n}?", "chosen": "yes", "rejected": "no!", "gap": n / 2} for n in range(3)]
    pairs = draw(*content, processor=text_model, margin_key="gap")
    assert len(pairs) == 3
    assert [sample.group for sample in pairs.samples] == [0, 0, 1, 1, 2, 2]
    assert [sample.response for sample in pairs.samples] == [0, 1, 2, 3, 4, 5]
    assert pairs.margins.tolist() == [0.0, 0.5, 1.0]
    texts = [text_model.tokenizer.decode(sample.tokens[sample.sampled]) for sample in pairs.samples]
    assert texts == ["yes<|im_end|>", "no!<|im_end|>"] * 3
    assert [sample.source for sample in pairs.samples] == ["mine:0", "mine:0", "mine:1", "mine:1", "mine:2", "mine:2"]


def test_all_formats_give_the_same_tokens(text_model: Processor) -> None:
    def share_gpt(response: str) -> list[dict[str, str]]:
        return [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": response}]

    formats: list[dict[str, Any]] = [
        {"input": "2 + 2?", "chosen": "four", "rejected": "five"},
        {"chosen": asked("2 + 2?", "four"), "rejected": asked("2 + 2?", "five")},
        {"chosen": share_gpt("four"), "rejected": share_gpt("five")},
        {"prompt": "2 + 2?", "chosen": asked("2 + 2?", "four"), "rejected": asked("2 + 2?", "five")},
        {"input": "2 + 2?", "chosen": "four", "rejected": [{"role": "assistant", "content": "five"}]},
        {
            "conversations": [{"from": "human", "value": "2 + 2?"}],
            "chosen": {"from": "gpt", "value": "four"},
            "rejected": {"from": "gpt", "value": "five"},
        },
    ]
    batches = [draw(row, processor=text_model).samples for row in formats]
    for chosen, rejected in batches:
        assert chosen.tokens.tolist() == batches[0][0].tokens.tolist()
        assert rejected.tokens.tolist() == batches[0][1].tokens.tolist()
        assert chosen.shares_prompt
        assert rejected.shares_prompt


def test_images_of_a_column_are_shared_and_computed_once(vlm: Processor) -> None:
    row = {"input": "what is <image>?", "images": IMAGE, "chosen": "red", "rejected": "blue!"}
    chosen, rejected = draw(row, processor=vlm).samples
    assert chosen.media == rejected.media
    assert chosen.num_prompt_images == rejected.num_prompt_images == 1
    pack = make_pack([chosen, rejected], range(2), "shared")
    assert pack.rows[0][0].prefix == chosen.prompt_length == rejected.prompt_length
    inline = {"chosen": with_image(IMAGE, "red"), "rejected": with_image(IMAGE.copy(), "blue!")}
    samples = draw(inline, processor=vlm).samples
    assert samples[0].media == samples[1].media
    assert all(sample.shares_prompt for sample in samples)


def test_responses_with_images_of_their_own_share_no_prompt(vlm: Processor) -> None:
    row = {"chosen": with_image(IMAGE, "a circle"), "rejected": with_image(OTHER, "a circle")}
    same = {"chosen": with_image(IMAGE, "red"), "rejected": with_image(IMAGE, "blue")}
    samples = draw(row, same, processor=vlm).samples
    assert [sample.shares_prompt for sample in samples] == [False, False, True, True]
    assert [sample.num_prompt_images for sample in samples] == [None, None, 1, 1]
    assert samples[0].media[0].hash != samples[1].media[0].hash
    pack = make_pack(samples, range(4), "shared")
    assert [branch.members for branch in pack.rows[0]] == [(0,), (1,), (2, 3)]


def test_questions_may_differ(text_model: Processor) -> None:
    row = {"chosen": asked("a?", "b"), "rejected": asked("c?", "b")}
    assert [sample.shares_prompt for sample in draw(row, processor=text_model).samples] == [False, False]


GOOD: dict[str, Any] = {"input": "what?", "chosen": "red", "rejected": "blue"}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"input": "what?", "chosen": "red", "rejected": "red"}, "chosen equals rejected"),
        ({"chosen": asked("a", "b"), "rejected": asked("a", "b")}, "chosen equals rejected"),
        ({"input": "what?", "chosen": "red", "rejected": " "}, "empty response"),
        ({"input": "what?", "chosen": None, "rejected": "red"}, "empty response"),
        ({"chosen": asked("a", "b"), "rejected": [*asked("a", "b"), *asked("c", "d")][::-1]}, "roles in a wrong order"),
        (
            {"chosen": with_image(IMAGE, "a"), "rejected": with_image(None, "b")},
            "question unusable",
        ),
        (
            {"chosen": with_image(IMAGE, "a"), "rejected": asked("<image> what?", "b")},
            "question unusable",
        ),
        ({"chosen": with_image(IMAGE, "a"), "rejected": with_image(b"\x89PNG", "b")}, "image unusable"),
        ({"input": "what?", "chosen": "red", "rejected": "blue " * 80}, "too long"),
        ({"input": "what? " * 80, "chosen": "red", "rejected": "blue"}, "too long"),
        ({"input": "what?", "chosen": "red", "rejected": "\ud800"}, "response unusable"),
        ({"input": "what?", "chosen": "red", "rejected": ["blue"]}, "response unusable"),
        ({"chosen": with_image(IMAGE, "a"), "rejected": with_image(IMAGE, "<image>")}, "response unusable"),
        ({"input": "what?", "chosen": "red", "rejected": "blue", "gap": "much"}, "margin unusable"),
    ],
)
def test_a_bad_row_is_dropped_counted_and_named(
    vlm: Processor, caplog: pytest.LogCaptureFixture, row: dict[str, Any], kind: str
) -> None:
    column = {"margin_key": "gap"} if "gap" in row else {}
    bad = stream(row, GOOD, processor=vlm, max_len=200, **column)
    pairs = collate_pairs(bad.all_prompts(2))
    assert [sample.source for sample in pairs.samples] == ["mine:1", "mine:1"]
    assert dict(bad.dropped) == {kind: 1}
    (line,) = caplog.messages
    assert line.startswith(f"row mine:0 dropped, {kind}: ")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "a", "chosen": "b"}, r"has no column 'rejected' \(data.rejected_key\); it has: input, chosen"),
        (
            {"question": "a", "chosen": "b", "rejected": "c"},
            r"no column 'input' .data.input_key., and its responses are no conversations.*data.input_key question",
        ),
    ],
)
def test_missing_columns_are_named(text_model: Processor, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        stream(row, processor=text_model)


def test_a_column_of_images_that_is_not_read_is_refused(vlm: Processor) -> None:
    with pytest.raises(DataError, match="has images in column 'photo'"):
        stream({**GOOD, "photo": IMAGE}, processor=vlm)


def test_a_resumed_stream_continues_and_refuses_other_responses(text_model: Processor) -> None:
    content = [{"input": f"{n}?", "chosen": "yes", "rejected": f"no {n}"} for n in range(9)]
    whole = [prompt.source for prompt in stream(*content, processor=text_model).draw(9)]
    first, second = stream(*content, processor=text_model), stream(*content, processor=text_model)
    first.draw(4)
    state = json.loads(json.dumps(first.state()))
    second.load_state(state)
    assert [prompt.source for prompt in second.draw(5)] == whole[4:]
    changed = [{**row, "rejected": "never"} for row in content]
    with pytest.raises(DataError, match="made with other data"):
        stream(*changed, processor=text_model).load_state(state)


def test_a_source_draws_and_holds_out_pairs(tmp_path: Path) -> None:
    model = str(tiny.build("qwen3", tmp_path / "model", size="micro"))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"ask": f"{n}?", "good": "y", "bad": "n"}) + "\n" for n in range(10)))
    data = {"prompt_dataset": f"{file}:input_key=ask:chosen_key=good:rejected_key=bad", "eval_fraction": 0.3}
    source = Source(
        model=model,
        trust_remote_code=False,
        data=PairData.model_validate(data),
        evaluation=EvalRows(),
        seed=1,
        requirements=PAIR,
    )
    pairs, metrics = source.draw_pairs(7)
    assert len(pairs) == 7
    assert len({sample.source for sample in pairs.samples}) == 7
    assert metrics["data/rows_dropped"] == 0
    ((name, held_out),) = source.evaluation_pairs().items()
    assert (name, len(held_out)) == ("rows", 3)


def test_pairs_have_two_samples_each() -> None:
    with pytest.raises(ValueError, match="0 responses of 1 pairs"):
        Pairs([], np.zeros(1, dtype=np.float32))
