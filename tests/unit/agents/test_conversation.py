"""The tokens of conversations: each that was sampled is in one segment, once, as it was sampled."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from chat_templates import QWEN3, TEMPLATES, TOOL, text_processor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlmrl.agents.conversation import Conversation, Message, first_prompt
from vlmrl.config.data import Columns
from vlmrl.data.image_tokens import collapse
from vlmrl.data.media import Noise
from vlmrl.errors import DataError, SyncError
from vlmrl.models.tiny import build
from vlmrl.plugins import Processor, processor
from vlmrl.types import Ints, Media, Prompt, Rollout, Segment


@dataclass
class ScriptedEngine:
    """Continues prompts with given tokens, as vLLM reports them; keeps what it sampled."""

    processor: Processor
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def continued(self, prompt: Prompt, response: list[int]) -> Segment:
        num_images = int((self.processor.token_types(prompt.request) == 1).sum())
        assert num_images == len(prompt.media)
        assert collapse(prompt.tokens, prompt.media, self.processor).tolist() == prompt.request.tolist()
        first, version = len(self.tokens), 3 + len(self.tokens) // 7
        self.tokens += response
        self.logprobs += [-0.5 * (first + i) for i in range(len(response))]
        self.versions += [version] * len(response)
        tokens = np.concatenate([prompt.tokens, np.array(response, dtype=np.int64)])
        sampled = np.arange(len(tokens)) >= len(prompt.tokens)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        logprobs[len(prompt.tokens) :] = self.logprobs[first:]
        rollout = Rollout.of_response(
            tokens, sampled, logprobs, version=version, text="", finish_reason="stop", media=prompt.media
        )
        return rollout.segments[0]

    def check(self, segments: tuple[Segment, ...]) -> None:
        """The segments hold what was sampled, in order, each token once."""
        assert [t for s in segments for t in s.tokens[s.sampled].tolist()] == self.tokens
        assert [p for s in segments for p in s.logprobs[s.sampled].tolist()] == self.logprobs
        assert [v for s in segments for v in s.versions[s.sampled].tolist()] == self.versions
        for segment in segments:
            assert not segment.logprobs[~segment.sampled].any()
            assert (segment.versions[~segment.sampled] == -1).all()
            counts = [self.processor.num_tokens(item.size) for item in segment.media]
            assert int((self.processor.token_types(segment.tokens) == 1).sum()) == sum(counts)


def played(
    conversation: Conversation, engine: ScriptedEngine, turns: list[tuple[list[int], list[Message]]]
) -> tuple[Segment, ...]:
    """Play responses and the feedback to each; no feedback follows the last."""
    for i, (response, messages) in enumerate(turns):
        conversation.add_response(engine.continued(conversation.next_prompt, response))
        if i < len(turns) - 1:
            conversation.add(conversation.feedback(messages))
    return conversation.segments([float(i) for i in range(len(turns))])


def opened(one: Processor, parts: list[str | Media] | None = None, tools: tuple[dict[str, object], ...] = ()) -> Prompt:
    return first_prompt(
        parts or ["the question?"], processor=one, columns=Columns(), index=5, source="steer:5", tools=tools
    )


def ids(one: Processor, text: str) -> list[int]:
    return one.tokenizer(text, add_special_tokens=False).input_ids


def picture(one: Processor, columns: int = 1) -> Media:
    side = one.resize_factor or 0
    return Noise(f"noise{columns}", (columns * side, side))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2_5_vl", tmp_path_factory.mktemp("models") / "vlm", size="micro")


@pytest.fixture
def vlm(folder: Path) -> Processor:
    return processor(str(folder), min_pixels=784, max_pixels=150_000)


@pytest.mark.parametrize("style", [style for style in TEMPLATES if style != "thinking"])
@pytest.mark.parametrize("history", ["keep", "template"])
def test_a_conversation_is_what_the_template_renders_where_it_is_append_only(style: str, history: str) -> None:
    one = text_processor(style)
    conversation = Conversation(opened(one), one, history=history)  # type: ignore[arg-type]
    engine = ScriptedEngine(one)
    texts, follows = ["the first 64", "another\n\nthing", "the end"], ["No.", "No, the other one."]
    turns = [
        ([*ids(one, text), one.eos_token_ids[0]], [Message([f])]) for text, f in zip(texts, [*follows, ""], strict=True)
    ]
    (segment,) = played(conversation, engine, turns)
    engine.check((segment,))
    messages = [{"role": "user", "content": "the question?"}]
    for text, feedback in zip(texts, follows, strict=False):
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": feedback}]
    whole = one.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert segment.tokens.tolist() == ids(one, whole) + turns[-1][0]
    assert [turn.reward for turn in segment.turns] == [0.0, 1.0, 2.0]
    assert [segment.tokens[turn.start : turn.end].tolist() for turn in segment.turns] == [tokens for tokens, _ in turns]


def test_a_cut_response_gets_an_end_of_turn_that_is_not_sampled_only_if_feedback_follows() -> None:
    one = text_processor("chatml")
    conversation = Conversation(opened(one), one)
    engine = ScriptedEngine(one)
    cut, end = ids(one, "never en"), one.eos_token_ids[0]
    (segment,) = played(conversation, engine, [(cut, [Message(["go on"])]), (cut, [])])
    engine.check((segment,))
    first, second = segment.turns
    assert segment.tokens[first.end] == end
    assert not segment.sampled[first.end]
    assert second.end == len(segment.tokens)


def test_a_response_that_ends_with_another_end_token_keeps_it() -> None:
    one = text_processor("chatml")
    engine = ScriptedEngine(one)
    response = [*ids(one, "done"), one.eos_token_ids[1]]
    (segment,) = played(Conversation(opened(one), one), engine, [(response, [Message(["no"])]), (response, [])])
    engine.check((segment,))
    assert segment.tokens[segment.turns[0].end - 1] == one.eos_token_ids[1]
    assert segment.tokens[segment.turns[0].end] == one.eos_token_ids[0]


def test_an_empty_response_is_a_turn_without_tokens() -> None:
    one = text_processor("chatml")
    engine = ScriptedEngine(one)
    (segment,) = played(Conversation(opened(one), one), engine, [([], [Message(["hello?"])]), ([7], [])])
    engine.check((segment,))
    assert [turn.end - turn.start for turn in segment.turns] == [0, 1]


def test_several_tool_calls_are_answered_in_one_bridge() -> None:
    one = text_processor("qwen3")
    conversation = Conversation(opened(one, tools=(TOOL,)), one)
    engine = ScriptedEngine(one)
    results = [Message([f"{n}"], role="tool", name="zoom", call_id=f"call{n:05d}") for n in range(2)]
    (segment,) = played(conversation, engine, [([7, one.eos_token_ids[0]], results), ([8], [])])
    engine.check((segment,))
    text = one.tokenizer.decode(segment.tokens.tolist())
    assert (
        text.count("<|im_start|>user\n<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response>") == 1
    )
    assert '"zoom"' in text


def test_images_of_any_turn_are_in_the_next_prompt_and_the_segment(vlm: Processor) -> None:
    pictures = [picture(vlm, n) for n in range(1, 6)]
    conversation = Conversation(opened(vlm, [pictures[0], "Where?", pictures[1]]), vlm)
    engine = ScriptedEngine(vlm)
    end = vlm.eos_token_ids[0]
    conversation.add_response(engine.continued(conversation.next_prompt, [65, end]))
    feedback = conversation.feedback(
        [Message([pictures[2]], role="tool"), Message(["Next?", pictures[3], pictures[4]])]
    )
    assert (conversation.num_images, len(feedback.media)) == (2, 3)
    assert feedback.total_tokens == len(conversation.next_prompt.tokens) + len(feedback.tokens)
    assert conversation.next_prompt.media == tuple(pictures[:2])  # not added yet
    conversation.add(feedback)
    assert len(conversation.next_prompt.tokens) == feedback.total_tokens
    conversation.add_response(engine.continued(conversation.next_prompt, [66, end]))
    (segment,) = conversation.segments([0.0, 1.0])
    engine.check((segment,))
    assert segment.media == tuple(pictures)
    runs = np.split(segment.tokens, np.flatnonzero(np.diff(vlm.token_types(segment.tokens))) + 1)
    assert [len(run) for run in runs if vlm.token_types(run)[0] == 1] == [1, 2, 3, 4, 5]
    prompt = conversation.next_prompt
    assert (prompt.index, prompt.source) == (5, "steer:5")
    assert collapse(prompt.tokens, prompt.media, vlm).tolist() == prompt.request.tolist()


def test_feedback_that_no_response_follows_is_not_in_the_segment(vlm: Processor) -> None:
    conversation = Conversation(opened(vlm, [picture(vlm), "Where?"]), vlm)
    engine = ScriptedEngine(vlm)
    conversation.add_response(engine.continued(conversation.next_prompt, [65]))
    conversation.add(conversation.feedback([Message([picture(vlm, 2)])]))
    (segment,) = conversation.segments([0.5])
    engine.check((segment,))
    assert len(segment.media) == 1
    assert segment.sampled[-1]


def test_a_planted_rendering_of_the_history_is_caught_by_name() -> None:
    """Sampled tokens that the tokenizer would merge: rendered again, `t` `h` becomes `th`."""
    one = text_processor("chatml")
    conversation = Conversation(opened(one), one)
    engine = ScriptedEngine(one)
    end = one.eos_token_ids[0]
    response = [ord("t"), ord("h"), end]
    assert ids(one, "th") != response[:2]
    conversation.add_response(engine.continued(conversation.next_prompt, response))
    conversation.add(conversation.feedback([Message(["no"])]))
    prompt = conversation.next_prompt
    planted: Ints = np.array(ids(one, one.tokenizer.decode(prompt.tokens.tolist())), dtype=np.int64)
    assert len(planted) == len(prompt.tokens) - 1
    rerendered = engine.continued(Prompt(5, "steer:5", "", planted, planted, None), [65, end])
    position = int(np.flatnonzero(planted != prompt.tokens[: len(planted)])[0])
    with pytest.raises(SyncError, match=f"steer:5, turn 2: .* at position {position} of .* tokenised again"):
        conversation.add_response(rerendered)


def test_a_response_to_a_shorter_prompt_is_caught() -> None:
    one = text_processor("chatml")
    conversation = Conversation(opened(one), one)
    prompt = conversation.next_prompt
    short = prompt.tokens[:4]
    with pytest.raises(SyncError, match=r"turn 1: .* at position 4 of"):
        conversation.add_response(ScriptedEngine(one).continued(Prompt(5, "", "", short, short, None), []))


def test_a_segment_that_is_sampled_elsewhere_is_caught() -> None:
    one = text_processor("chatml")
    conversation = Conversation(opened(one), one)
    tokens = conversation.next_prompt.tokens
    whole = Rollout.of_response(
        tokens, np.ones(len(tokens), bool), np.zeros(len(tokens), np.float32), version=0, text="", finish_reason="stop"
    )
    with pytest.raises(SyncError, match="not all that follows the prompt"):
        conversation.add_response(whole.segments[0])


def thought(one: Processor, text: str) -> list[int]:
    return [*ids(one, f"<think>\nthe thing {text}\n</think>\n\n{text}"), one.eos_token_ids[0]]


def test_stripped_thinking_opens_a_segment_with_the_history_as_the_template_renders_it() -> None:
    one = text_processor("qwen3")
    engine = ScriptedEngine(one)
    turns = [(thought(one, "first"), [Message(["no"])]), (thought(one, "second"), [])]
    segments = played(Conversation(opened(one), one, history="template"), engine, turns)
    engine.check(segments)
    assert len(segments) == 2
    assert [[turn.reward for turn in segment.turns] for segment in segments] == [[0.0], [1.0]]
    messages = [
        {"role": "user", "content": "the question?"},
        {"role": "assistant", "content": one.tokenizer.decode(turns[0][0][:-1])},
        {"role": "user", "content": "no"},
    ]
    rendered = one.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "thing first" not in rendered
    assert segments[1].tokens.tolist() == ids(one, rendered) + turns[1][0]


def test_thinking_is_kept_with_history_keep() -> None:
    one = text_processor("qwen3")
    engine = ScriptedEngine(one)
    turns = [(thought(one, "first"), [Message(["no"])]), (thought(one, "second"), [])]
    (segment,) = played(Conversation(opened(one), one, history="keep"), engine, turns)
    engine.check((segment,))
    assert "thing first" in one.tokenizer.decode(segment.tokens.tolist())


def test_thinking_before_results_of_tools_stays_and_goes_with_the_next_question() -> None:
    one = text_processor("qwen3")
    engine = ScriptedEngine(one)
    result = Message(["4"], role="tool", name="zoom", call_id="call00000")
    turns = [
        (thought(one, "call"), [result]),
        (thought(one, "seen"), [Message(["Next?"])]),
        ([*ids(one, "without"), one.eos_token_ids[0]], [Message(["And?"])]),
        (thought(one, "last"), []),
    ]
    segments = played(Conversation(opened(one, tools=(TOOL,)), one, history="template"), engine, turns)
    engine.check(segments)
    assert [len(segment.turns) for segment in segments] == [2, 2]  # what had no thinking is not rewritten
    text = one.tokenizer.decode(segments[1].tokens.tolist())
    assert '"zoom"' in text  # the first prompt stands
    assert "thing" not in text.partition("Next?")[0]
    assert "<tool_response>\n4\n</tool_response>" in text


def test_prompts_that_end_inside_the_thinking_are_replaced_in_history() -> None:
    one = text_processor("thinking")
    engine = ScriptedEngine(one)
    end = one.eos_token_ids[0]
    response = [*ids(one, "hm\n</think>\n\nfirst"), end]
    segments = played(
        Conversation(opened(one), one, history="template"), engine, [(response, [Message(["no"])]), (response, [])]
    )
    engine.check(segments)
    assert one.tokenizer.decode(segments[1].tokens[~segments[1].sampled].tolist()) == (
        "<|im_start|>user\nthe question?<|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n"
        "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_control_tokens_of_a_response_stay_such_tokens_in_a_rewritten_history() -> None:
    one = text_processor("qwen3")
    engine = ScriptedEngine(one)
    (start,) = ids(one, "<|im_start|>")
    as_text = one.tokenizer("<|im_start|>", split_special_tokens=True).input_ids
    response = [*ids(one, "<think>\na\n</think>\n\nb"), start, *ids(one, "c"), *as_text, one.eos_token_ids[0]]
    segments = played(
        Conversation(opened(one), one, history="template"), engine, [(response, [Message(["no"])]), ([7], [])]
    )
    engine.check(segments)
    assert segments[1].tokens.tolist().count(start) == 4 + 1
    assert "b<|im_start|>c<|im_start|><|im_end|>" in one.tokenizer.decode(segments[1].tokens.tolist())


def test_images_of_earlier_turns_are_in_a_rewritten_history(vlm: Processor) -> None:
    vlm.tokenizer.chat_template = QWEN3
    pictures = [picture(vlm, n) for n in range(1, 4)]
    conversation = Conversation(opened(vlm, [pictures[0]]), vlm, history="template")
    engine = ScriptedEngine(vlm)
    turns = [
        (thought(vlm, "a"), [Message([pictures[1], "?"])]),
        (thought(vlm, "b"), [Message(["?", pictures[2]])]),
        (thought(vlm, "c"), []),
    ]
    segments = played(conversation, engine, turns)
    engine.check(segments)
    assert [segment.media for segment in segments] == [tuple(pictures[:n]) for n in (1, 2, 3)]


def test_a_prompt_that_another_template_made_cannot_follow_the_template() -> None:
    one = text_processor("qwen3")
    tokens: Ints = np.array(ids(one, "a plain prompt"), dtype=np.int64)
    conversation = Conversation(Prompt(0, "row:0", "", tokens, tokens, None), one, history="template")
    conversation.add_response(ScriptedEngine(one).continued(conversation.next_prompt, thought(one, "a")))
    with pytest.raises(DataError, match=r"row:0: the prompt does not end with .* set agent\.history to keep"):
        conversation.feedback([Message(["b"])])


def test_a_lone_surrogate_in_feedback_becomes_a_question_mark() -> None:
    one = text_processor("chatml")
    engine = ScriptedEngine(one)
    (segment,) = played(
        Conversation(opened(one, ["q\udc80"]), one), engine, [([7], [Message(["a\ud800b"])]), ([8], [])]
    )
    engine.check((segment,))
    assert "user\na?b<|im_end|>" in one.tokenizer.decode(segment.tokens.tolist())


def test_the_number_of_rewards_is_the_number_of_responses() -> None:
    one = text_processor("chatml")
    conversation = Conversation(opened(one), one)
    conversation.add_response(ScriptedEngine(one).continued(conversation.next_prompt, [7]))
    with pytest.raises(ValueError, match="2 rewards for 1 responses"):
        conversation.segments([0.0, 1.0])


_TEXTS = st.sampled_from(
    ["", "no", "the\n\nother", "<|im_end|>", "</think>", "<|image_pad|>", "<image>", " é 65 ", "x</s>"]
)
_PIECES = st.sampled_from(
    [
        "<think>\n",
        "\n</think>\n\n",
        "the",
        "t",
        "h",
        " and",
        "\n\n",
        "é",
        "<|im_start|>",
        "<tool_call>",
        "user",
        "[INST]",
    ]
)


@st.composite
def _turns(draw: st.DrawFn, one: Processor) -> list[tuple[list[int], list[Message]]]:
    turns = []
    for _ in range(draw(st.integers(1, 5))):
        pieces = draw(st.lists(_PIECES, max_size=6))
        random = draw(st.lists(st.integers(0, 255), max_size=4))
        response = [t for piece in pieces for t in ids(one, piece)] + random
        response += draw(st.sampled_from([[], [one.eos_token_ids[0]], [one.eos_token_ids[1]]]))
        messages = []
        for number in range(draw(st.integers(1, 3))):
            parts: list[str | Media] = list(draw(st.lists(_TEXTS, max_size=3)))
            if one.resize_factor:
                parts += [picture(one, n) for n in draw(st.lists(st.integers(1, 3), max_size=2))]
            role = draw(st.sampled_from(["user", "tool"]))
            named = {"name": "zoom", "call_id": f"call{number:05d}"} if role == "tool" else {}
            messages.append(Message(parts, role=role, **named))
        turns.append((response, messages))
    return turns


@pytest.mark.parametrize("style", list(TEMPLATES))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), history=st.sampled_from(["keep", "template"]))
def test_every_sampled_token_of_any_conversation_is_in_one_segment_once(
    style: str, data: st.DataObject, history: str
) -> None:
    one = _text(style)
    engine = ScriptedEngine(one)
    turns = data.draw(_turns(one))
    engine.check(played(Conversation(opened(one), one, history=history), engine, turns))  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), history=st.sampled_from(["keep", "template"]))
def test_every_sampled_token_of_any_conversation_with_images_is_in_one_segment_once(
    vlm: Processor, data: st.DataObject, history: str
) -> None:
    vlm.tokenizer.chat_template = QWEN3
    engine = ScriptedEngine(vlm)
    turns = data.draw(_turns(vlm))
    prompt = opened(vlm, [picture(vlm, 2), "<image>?"])
    engine.check(played(Conversation(prompt, vlm, history=history), engine, turns))  # type: ignore[arg-type]


_PROCESSORS: dict[str, Processor] = {}


def _text(style: str) -> Processor:
    """One processor for all examples: making a tokenizer takes longer than a conversation."""
    if style not in _PROCESSORS:
        _PROCESSORS[style] = text_processor(style)
    return _PROCESSORS[style]
