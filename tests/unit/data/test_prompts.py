import json
import logging
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from prompt_streams import IMAGE, labels, numbered, rows, stream

from vlmrl.config.data import Columns
from vlmrl.data.columns import RowRequirements
from vlmrl.data.prompts import PromptStream
from vlmrl.data.row_sequence import RowSequence
from vlmrl.data.rows import Rows, load_rows
from vlmrl.errors import ConfigError, DataError, EndOfRowsError
from vlmrl.plugins import Processor
from vlmrl.types import Prompt


def test_a_prompt_holds_the_columns_of_its_row(vlm: Processor) -> None:
    row = {
        "input": "What is <image>?",
        "label": 3,
        "images": IMAGE,
        "level": 2,
        "tags": ["a"],
        "raw": b"\0",
        "answer": "3!",
    }
    (prompt,) = stream(rows([row]), processor=vlm).draw(1)
    assert prompt.index == 0
    assert prompt.source == "mine:0"
    assert prompt.label == "3"
    assert dict(prompt.metadata) == {"level": 2, "tags": ["a"], "answer": "3!"}
    assert prompt.text.startswith("<|im_start|>user\nWhat is <|vision_start|><|image_pad|><|vision_end|>?")
    assert [media.size for media in prompt.media] == [(56, 56)]
    assert len(prompt.tokens) == len(prompt.request) + 3  # 56x56 pixels are 2x2 tokens of 28x28


def test_the_messages_of_a_prompt_hold_its_images_in_place(vlm: Processor) -> None:
    chat = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "?"}],
        },
    ]
    questions: list[Any] = ["What is <image>?", "how many?", chat]
    given = rows([{"input": question, "images": IMAGE} for question in questions])
    prompts = stream(given, processor=vlm, system_prompt="be brief").all_prompts(3)
    system = ("system", ("be brief",))
    (image,) = {prompt.media for prompt in prompts}
    assert [[(message.role, message.parts) for message in prompt.messages] for prompt in prompts] == [
        [system, ("user", ("What is ", *image, "?"))],
        [system, ("user", (*image, "how many?"))],
        [system, ("user", ("one?",)), ("assistant", ("1",)), ("user", ("and", *image, "?"))],
    ]


def test_marks_are_removed_from_the_prompts_text(vlm: Processor) -> None:
    (prompt,) = stream(rows([{"input": "say <|image_pad|>"}]), processor=vlm).draw(1)
    assert "say <|image_pad|><|im_end|>" in prompt.text
    assert prompt.text == vlm.tokenizer.decode(prompt.tokens)
    assert prompt.label is None


def test_every_episode_has_each_row_once_in_a_new_order(text_model: Processor) -> None:
    prompts = stream(numbered(7), processor=text_model).draw(21)
    assert [prompt.index for prompt in prompts] == list(range(21))
    episodes = [labels(prompts[start : start + 7]) for start in (0, 7, 14)]
    for episode in episodes:
        assert sorted(map(str, episode)) == [str(i) for i in range(7)]
    assert episodes[0] != episodes[1] != episodes[2]


def test_the_stream_does_not_depend_on_the_sizes_of_draws(text_model: Processor) -> None:
    whole = stream(numbered(10), processor=text_model).draw(25)
    cut = stream(numbered(10), processor=text_model)
    pieces = [prompt for n in (1, 9, 3, 12) for prompt in cut.draw(n)]
    assert labels(pieces) == labels(whole)
    assert [prompt.index for prompt in pieces] == list(range(25))


@pytest.mark.parametrize("probs", [None, [0.3, 0.7]])
def test_a_resumed_stream_loses_and_repeats_nothing(text_model: Processor, probs: list[float] | None) -> None:
    def fresh() -> PromptStream:
        # Two rows of each source are unusable, so that the numbers of rows and prompts differ.
        sources = [
            rows([{"input": "" if i in (2, 5) else f"{n}-{i}", "label": f"{n}-{i}"} for i in range(9)], n) for n in "ab"
        ]
        return stream(*sources, processor=text_model, probs=probs, max_dropped_fraction=0.5)

    unbroken = fresh()
    expected = unbroken.draw(50)
    for cut in (0, 1, 7, 13, 14, 15, 33):
        first = fresh()
        first.draw(cut)
        state = json.loads(json.dumps(first.state()))
        second = fresh()
        second.load_state(state)
        rest = second.draw(50 - cut)
        assert labels(rest) == labels(expected[cut:])
        assert [prompt.index for prompt in rest] == list(range(cut, 50))
        assert second.dropped == unbroken.dropped
        assert second.position == 50


@pytest.mark.parametrize(
    ("sources", "settings"),
    [
        ([numbered(6)], {}),
        ([numbered(5, "other")], {}),
        ([rows([{"input": f"mine {i}!", "label": str(i)} for i in range(5)])], {}),
        ([numbered(5)], {"seed": 1}),
        ([numbered(5)], {"probs": [1.0]}),
    ],
    ids=["more rows", "another name", "other questions", "another seed", "shares"],
)
def test_a_state_of_other_data_is_refused(text_model: Processor, sources: list[Rows], settings: dict[str, Any]) -> None:
    state = stream(numbered(5), processor=text_model).state()
    with pytest.raises(DataError, match="made with other data"):
        stream(*sources, processor=text_model, **settings).load_state(state)


def test_shares_mix_sources(text_model: Processor) -> None:
    mixed = stream(numbered(100, "a"), numbered(5, "b"), processor=text_model, probs=[1, 3]).draw(400)
    share = np.mean([prompt.source.startswith("b:") for prompt in mixed])
    assert share == pytest.approx(0.75, abs=0.07)
    with pytest.raises(ConfigError, match="2 shares for 1 datasets"):
        stream(numbered(5), processor=text_model, probs=[1, 3])


def test_unusable_rows_are_dropped_whole_counted_and_named(
    vlm: Processor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    content: list[dict[str, Any]] = [
        {"input": "fine", "images": [IMAGE]},
        {"input": "missing", "images": ["gone.png"]},
        {"input": "truncated", "images": [str(tmp_path / "cut.png")]},
        {"input": "one <image> two <image>", "images": [IMAGE]},
        {"input": "one <image>", "images": [IMAGE, IMAGE, IMAGE]},
        {"input": "x" * 3000, "images": []},
        {"input": "many", "images": [IMAGE] * 9},
        {"input": None, "images": []},
        {"input": [{"role": "user", "content": [{"type": "image"}]}], "images": []},
        {"input": "bomb", "images": [Image.new("1", (300, 300))]},
    ]
    with caplog.at_level(logging.WARNING):
        one = stream(rows(content), processor=vlm, max_dropped_fraction=1.0, max_image_pixels=80_000)
        prompts = one.draw(3)
    assert [prompt.source for prompt in prompts] == ["mine:0"] * 3
    assert one.dropped == {
        "image unusable": 3,
        "question and images do not fit": 2,
        "too long": 1,
        "too many images": 1,
        "no question": 1,
        "question unusable": 1,
    }
    assert "row mine:1 dropped, image unusable: image file gone.png does not exist" in caplog.text
    assert "row mine:5 dropped, too long: 30" in caplog.text
    # A row is reported and counted once, in whichever number of episodes.
    assert caplog.text.count("mine:1 ") == 1


def test_a_row_with_more_images_than_a_conversation_may_have_is_dropped(
    vlm: Processor, caplog: pytest.LogCaptureFixture
) -> None:
    content = [{"input": f"{count} pictures", "images": [IMAGE] * count} for count in (1, 2, 3)]
    for agent_max_images, dropped in ((1, 2), (2, 1), (9, 0), (None, 0)):
        columns = Columns(max_dropped_fraction=1.0, max_images_per_prompt=3)
        one = PromptStream(
            [rows(content)],
            probs=None,
            processor=vlm,
            columns=columns,
            seed=0,
            agent_max_images=agent_max_images,
        )
        assert len(one.draw(3)) == 3
        assert one.dropped["too many images"] == dropped
    assert "row mine:2 dropped, too many images: 3 images, agent.max_images is 2" in caplog.text


def test_a_prompt_that_is_too_long_with_its_tools_names_them(text_model: Processor) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": f"move_{i}", "description": "Move.", "parameters": parameters}}
        for i in range(10)
    ]

    def of(tools: list[dict[str, Any]], max_len: int) -> PromptStream:
        columns = Columns(max_len=max_len)
        return PromptStream([numbered(3)], probs=None, processor=text_model, columns=columns, seed=0, tools=tools)

    (plain,), (full,) = (of(shown, 4096).draw(1) for shown in ([], tools))
    share = len(full.tokens) - len(plain.tokens)
    assert share > 100
    message = (
        rf"3 of the first \d+ rows cannot be used \(3 too long; the last: mine:\d \({len(full.tokens)} tokens, "
        rf"data.max_len is {share}; {share} of them describe the environment's tools: raise data.max_len, which holds"
    )
    with pytest.raises(DataError, match=message):
        of(tools, share).draw(3)
    with pytest.raises(DataError, match=r"tokens, data.max_len is 2\)\); data.max_dropped_fraction"):
        of([], 2).draw(1)


def test_a_row_with_a_label_that_no_response_can_match_is_dropped(
    text_model: Processor, caplog: pytest.LogCaptureFixture
) -> None:
    checked: list[list[str]] = []

    def problems(labels: Sequence[str]) -> list[str | None]:
        checked.append(list(labels))
        return ["it cannot be parsed" if "{" in label else None for label in labels]

    content = [{"input": "a", "label": "4"}, {"input": "b", "label": "\\frac{1}{" + "x" * 99}, {"input": "c"}]
    one = PromptStream(
        [rows(content)],
        probs=None,
        processor=text_model,
        columns=Columns(max_dropped_fraction=0.5),
        seed=0,
        label_problems=problems,
    )
    assert sorted(one.labels(9, limit_s=9.0)) == ["mine:0", "mine:1"]
    with caplog.at_level(logging.WARNING):
        prompts = [prompt for _ in range(6) for prompt in one.draw(1)]
    assert {prompt.source for prompt in prompts} == {"mine:0", "mine:2"}
    assert one.dropped == {"label unusable": 1}
    assert "row mine:1 dropped, label unusable: '\\\\frac{1}{xx" in caplog.text
    assert caplog.text.count("it cannot be parsed") == 1
    assert "x" * 90 not in caplog.text
    assert {prompt.source for prompt in one.all_prompts(9)} == {"mine:0", "mine:2"}
    assert sum("\\frac" in label for labels in checked for label in labels) == 1, "a label is checked once"


def test_reading_labels_does_not_advance_the_stream_and_is_limited_in_time(text_model: Processor) -> None:
    one, other = stream(numbered(9), processor=text_model), stream(numbered(9), processor=text_model)
    first = one.labels(4, limit_s=9.0)
    assert list(first.values()) == labels(one.draw(9))[:4]
    assert len(other.labels(9, limit_s=-1.0)) == 1


def test_too_many_unusable_rows_stop_the_run(text_model: Processor) -> None:
    content = [{"input": "" if i < 3 else "ok"} for i in range(50)]
    allowed = stream(rows(content), processor=text_model, max_dropped_fraction=0.06)
    assert len(allowed.draw(60)) == 60
    refused = stream(rows(content), processor=text_model, max_dropped_fraction=0.059)
    with pytest.raises(DataError, match=r"3 of the first \d+ rows cannot be used \(3 no question; the last: mine:\d"):
        refused.draw(60)
    with pytest.raises(DataError, match="3 of the first 50 rows"):
        stream(rows(content), processor=text_model).all_prompts(50)


def test_a_large_unusable_dataset_stops_early(text_model: Processor) -> None:
    class Empty(Sequence[dict[str, Any]]):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: Any) -> Any:
            return {"input": ""}

    empty = Rows(name="empty", rows=Empty(), columns=("input",))
    with pytest.raises(DataError, match="of the first"):
        stream(empty, processor=text_model).draw(64)


def test_a_dataset_without_a_single_usable_row_stops_even_when_all_may_be_dropped(text_model: Processor) -> None:
    with pytest.raises(DataError, match="2 of the first 2 rows"):
        stream(rows([{"input": ""}, {"input": ""}]), processor=text_model, max_dropped_fraction=1.0).draw(1)


def test_an_empty_dataset_is_refused(text_model: Processor) -> None:
    with pytest.raises(DataError, match="dataset mine has no rows"):
        stream(rows([]), processor=text_model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"input_key": "inpt"},
            r"no column 'inpt' \(data.input_key\); it has: input, label; did you mean --",
        ),
        ({"label_key": "gold"}, r"no column 'gold' \(data.label_key\); it has: input, label"),
        ({"image_key": "picture"}, r"no column 'picture' \(data.image_key\)"),
    ],
)
def test_a_configured_column_must_exist(text_model: Processor, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        stream(numbered(3), processor=text_model, **settings)


def test_labels_and_images_are_optional_by_default(text_model: Processor) -> None:
    assert labels(stream(rows([{"input": "a"}]), processor=text_model).draw(1)) == [None]


def test_sources_may_differ_in_optional_columns_and_plugins_keep_their_own(vlm: Processor) -> None:
    generated = load_rows("visual_math?size=4&families=count&pixels=56", split="train", max_samples=9, seed=0)
    mine = rows([{"question": "a", "pic": IMAGE, "gold": "7"}])
    bare = rows([{"question": "b"}], "bare")
    one = stream(generated, mine, bare, processor=vlm, input_key="question", image_key="pic", label_key="gold")
    by_source = {prompt.source.partition(":")[0]: prompt for prompt in one.all_prompts(10)}
    assert len(by_source["visual_math"].media) == 1
    assert by_source["visual_math"].label is not None
    assert by_source["mine"].label == "7"
    assert by_source["bare"].media == ()


def test_the_column_of_a_nested_label_stays_in_the_metadata(text_model: Processor) -> None:
    content = [{"input": "q", "reward_model": {"style": "rule", "ground_truth": 4}}]
    (prompt,) = stream(rows(content), processor=text_model, label_key="reward_model.ground_truth").draw(1)
    assert prompt.label == "4"
    assert prompt.metadata == {"reward_model": {"style": "rule", "ground_truth": 4}}


def test_a_row_without_a_label_is_dropped_if_a_reward_needs_one(
    text_model: Processor, caplog: pytest.LogCaptureFixture
) -> None:
    content = [{"input": "a", "label": "1"}, {"input": "b", "label": None}]
    one = PromptStream(
        [rows(content)],
        probs=None,
        processor=text_model,
        columns=Columns(max_dropped_fraction=0.5),
        seed=0,
        requirements=RowRequirements(label_for="reward.functions math"),
    )
    assert labels(one.draw(4)) == ["1"] * 4
    assert one.dropped == {"no label": 1}
    assert "mine:1 dropped, no label: column 'label' is empty, and reward.functions math needs it" in caplog.text


def test_all_prompts_keeps_row_order_and_does_not_advance_the_stream(text_model: Processor) -> None:
    one = stream(numbered(5, "a"), numbered(5, "b"), processor=text_model)
    prompts = one.all_prompts(7)
    assert [prompt.source for prompt in prompts] == [f"a:{i}" for i in range(5)] + ["b:0", "b:1"]
    assert one.position == 0
    assert one.num_rows == 10


def test_all_prompts_begins_anywhere_in_any_source(text_model: Processor) -> None:
    one = stream(numbered(3, "a"), numbered(1, "b"), numbered(4, "c"), processor=text_model)
    names = [f"{name}:{row}" for name, size in (("a", 3), ("b", 1), ("c", 4)) for row in range(size)]
    for start in range(9):
        prompts = one.all_prompts(3, start=start)
        assert [prompt.source for prompt in prompts] == names[start : start + 3]
        assert [prompt.index for prompt in prompts] == list(range(start, min(start + 3, 8)))


@pytest.mark.timeout(60)
def test_the_last_rows_of_a_large_set_are_read_at_once(text_model: Processor) -> None:
    class Many(RowSequence):
        def __len__(self) -> int:
            return 10**12

        def _row(self, index: int) -> dict[str, Any]:
            return {"input": str(index), "label": "1"}

    large = Rows(name="large", rows=Many(), columns=("input", "label"))
    prompts = stream(large, processor=text_model).all_prompts(5, start=10**12 - 2)
    assert [prompt.source for prompt in prompts] == [f"large:{10**12 - 2}", f"large:{10**12 - 1}"]


def test_a_column_that_a_row_omits_is_none(text_model: Processor) -> None:
    content = [{"input": "a", "level": 3}, {"input": "b"}]
    prompts = stream(rows(content), processor=text_model).all_prompts(2)
    assert [dict(prompt.metadata) for prompt in prompts] == [{"level": 3}, {"level": None}]
    own = replace(rows(content), has_own_columns=True)
    assert dict(stream(own, processor=text_model).all_prompts(2)[1].metadata) == {}


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_usable_row_is_read_once_per_episode_wherever_rows_are_dropped(
    text_model: Processor, data: st.DataObject
) -> None:
    bad = data.draw(st.lists(st.booleans(), min_size=2, max_size=9).filter(lambda bad: not all(bad)))
    episodes, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    source = rows([{"input": "" if is_bad else f"q{i}", "label": str(i)} for i, is_bad in enumerate(bad)])

    def fresh() -> PromptStream:
        columns = Columns(max_dropped_fraction=1.0)
        return PromptStream([source], probs=None, processor=text_model, columns=columns, seed=4, episodes=episodes)

    current, drawn = fresh(), list[Prompt]()
    while True:
        if data.draw(st.booleans()):  # the run is killed here and resumed
            state = json.loads(json.dumps(current.state()))
            current = fresh()
            current.load_state(state)
        try:
            drawn += current.draw(size)
        except EndOfRowsError as error:
            left_out = error.left_out
            break
    assert left_out < size
    drawn += current.draw(left_out)  # the stream has not advanced
    usable = [str(i) for i, is_bad in enumerate(bad) if not is_bad]
    assert [prompt.index for prompt in drawn] == list(range(len(usable) * episodes))
    for first in range(0, len(drawn), len(usable)):
        assert sorted(map(str, labels(drawn[first : first + len(usable)]))) == usable
    with pytest.raises(EndOfRowsError):
        current.draw(1)


def test_the_end_of_the_rows_says_how_many_are_dropped_and_left_out(text_model: Processor) -> None:
    source = rows([{"input": "" if i == 3 else f"q{i}"} for i in range(6)])
    columns = Columns(max_dropped_fraction=0.5)
    short = PromptStream([source], probs=None, processor=text_model, columns=columns, seed=0, episodes=1)
    short.draw(3)
    with pytest.raises(EndOfRowsError) as error:
        short.draw(3)
    assert str(error.value) == (
        "the 6 rows of the data are read as often as train.max_epochs says (1 of them are dropped); the last 2 do not "
        "fill a batch of 3 and are left out"
    )
    assert pickle.loads(pickle.dumps(error.value)).left_out == error.value.left_out == 2
