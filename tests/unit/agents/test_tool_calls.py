"""Tool calls of responses, by vLLM's parsers, on a copy of the text."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from chat_templates import TOOL, text_processor

from vlmrl.agents.tool_calls import MAX_CALLS, TextParser, ToolCallParser, ToolCalls, as_function
from vlmrl.plugins import Processor
from vlmrl.rollout.tool_parsers import vllm_tool_parser

CALL = '<tool_call>\n{"name": "zoom", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen() -> Processor:
    return text_processor("qwen3")


@pytest.fixture(scope="module")
def hermes(qwen: Processor) -> TextParser:
    return vllm_tool_parser("hermes", qwen.tokenizer, [TOOL])


PROMPT = "<|im_start|>assistant\n"


def parsed(
    one: Processor,
    parser: TextParser,
    text: str,
    *,
    end: bool = True,
    tool_format: str = "hermes",
    prompt: str = PROMPT,
) -> ToolCalls:
    before, tokens = (one.tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, text))
    tokens += [one.eos_token_ids[0]] * end
    return ToolCallParser(one, parser, tool_format).parse(
        np.array(tokens, dtype=np.int64), prompt=np.array(before, dtype=np.int64)
    )


def test_calls_have_name_arguments_and_equal_ids_in_equal_runs(qwen: Processor, hermes: TextParser) -> None:
    first, again = (parsed(qwen, hermes, f"I look.\n{CALL}\n{CALL.replace('1', '2')}") for _ in range(2))
    assert first.problem is None
    assert [(call.name, call.arguments) for call in first.calls] == [("zoom", {"x": 1}), ("zoom", {"x": 2})]
    assert first == again
    ids = [call.id for call in first.calls]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_the_text_before_the_calls_has_no_control_tokens(qwen: Processor, hermes: TextParser) -> None:
    parser = ToolCallParser(qwen, hermes, "hermes")
    end = qwen.eos_token_ids[0]
    for text, before in (
        (f"I look.\n{CALL}\n{CALL}", "I look."),
        (f"<think>\n{CALL}?\n</think>\n\nYes. {CALL}", f"<think>\n{CALL}?\n</think>\n\nYes."),
        (CALL, ""),
        ("No call. ", "No call."),
    ):
        tokens = qwen.tokenizer(text, add_special_tokens=False).input_ids
        assert parser.text_before(np.array([*tokens, end], dtype=np.int64)) == before


def test_the_tokens_stay_as_they_are(qwen: Processor, hermes: TextParser) -> None:
    tokens = np.array([*b'<tool_call>{"name"', qwen.eos_token_ids[0]], dtype=np.int64)
    before = tokens.copy()
    assert ToolCallParser(qwen, hermes, "hermes").parse(tokens, prompt=tokens).problem
    assert np.array_equal(tokens, before)


def test_a_response_without_a_call_has_none(qwen: Processor, hermes: TextParser) -> None:
    assert parsed(qwen, hermes, 'The answer is 64. {"x": 1}') == ToolCalls()
    assert parsed(qwen, hermes, "", end=False) == ToolCalls()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "zoom", </tool_call>', "The tool call could not be parsed: Expecting property name"),
        ("<tool_call></tool_call>", "could not be parsed: Expecting value"),
        ('<tool_call>{"name": "zoom"}</tool_call>', 'must be a JSON object with "name" and "arguments"'),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', "must be a JSON object"),
        ("<tool_call>[1]</tool_call>", "must be a JSON object"),
        (f"{CALL}<tool_call>{{</tool_call>", "could not be parsed: Expecting property name"),
        ('<tool_call>{"name": "zoom", "arguments": "{}"}</tool_call>', "arguments of zoom are not a JSON object"),
        ('<tool_call>{"name": "zoom", "arguments": [1]}</tool_call>', "arguments of zoom are not a JSON object"),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "The tool call has no name."),
        ("<tool_call>" + "[" * 7000, "could not be parsed"),
        ("<function=zoom>", "could not be parsed"),
        (CALL * (MAX_CALLS + 1), "17 tool calls in one response are too many: at most 16"),
    ],
)
def test_a_call_that_fails_is_told_in_one_line(
    qwen: Processor, hermes: TextParser, text: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = parsed(qwen, hermes, text)
    assert result.calls == ()
    assert problem in (result.problem or "")
    assert "\n" not in (result.problem or "")
    assert not caplog.records  # vLLM logs a traceback for each


def test_a_cut_call_is_told(qwen: Processor, hermes: TextParser) -> None:
    assert parsed(qwen, hermes, CALL[:30], end=False).problem


def test_calls_in_the_thinking_do_not_count(qwen: Processor, hermes: TextParser) -> None:
    assert parsed(qwen, hermes, f"<think>\nmaybe {CALL}\n</think>\n\nNo.") == ToolCalls()
    assert parsed(qwen, hermes, f"<think>\nmaybe {CALL}") == ToolCalls()
    assert parsed(qwen, hermes, f"maybe <tool_call>\n</think>\n\n{CALL}").calls[0].arguments == {"x": 1}


@pytest.mark.parametrize("prompt", [f"{PROMPT}<think>\n", f"{PROMPT}<think>"])
def test_calls_in_thinking_that_the_prompt_began_do_not_count(qwen: Processor, hermes: TextParser, prompt: str) -> None:
    assert parsed(qwen, hermes, f"maybe {CALL} but", end=False, prompt=prompt) == ToolCalls()
    assert parsed(qwen, hermes, "maybe <tool_call>", end=False, prompt=prompt) == ToolCalls()
    assert parsed(qwen, hermes, f"maybe {CALL}\n</think>\n\nNo.", prompt=prompt) == ToolCalls()
    assert parsed(qwen, hermes, f"maybe\n</think>\n\n{CALL}", prompt=prompt).calls[0].arguments == {"x": 1}


def test_marks_of_calls_that_are_special_tokens_are_seen() -> None:
    mistral = text_processor("mistral")
    parser = vllm_tool_parser("mistral", mistral.tokenizer, [TOOL])
    (call,) = parsed(mistral, parser, '[TOOL_CALLS][{"name": "zoom", "arguments": {"x": 3}}]').calls
    assert (call.name, call.arguments) == ("zoom", {"x": 3})
    assert parsed(mistral, parser, '[TOOL_CALLS][{"name"').problem


@pytest.mark.parametrize(
    ("style", "name", "text", "failing"),
    [
        ("llama3", "llama3_json", '{"name": "zoom", "parameters": {"x": 1}}', '{"name": "zoom"'),
        (
            "qwen3",
            "qwen3_coder",
            "<tool_call>\n<function=zoom>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>zoom</tool_call>",
        ),
        ("qwen3", "pythonic", "[zoom(x=1)]", "[zoom(x="),
    ],
)
def test_other_formats(style: str, name: str, text: str, failing: str) -> None:
    one = text_processor(style)
    parser = vllm_tool_parser(name, one.tokenizer, [TOOL])
    assert [(call.name, call.arguments) for call in parsed(one, parser, text).calls] == [("zoom", {"x": 1})]
    assert parsed(one, parser, failing, tool_format=name) == ToolCalls(problem="The tool call could not be parsed.")


def test_a_parser_that_raises_is_told(qwen: Processor) -> None:
    def broken(text: str) -> list[tuple[str, str, str]]:
        raise RuntimeError("two\nlines")

    assert parsed(qwen, broken, "a").problem == "The tool call could not be parsed: two\\nlines."


def test_an_id_that_the_model_wrote_is_kept(qwen: Processor) -> None:
    result = parsed(qwen, lambda text: [("zoom", "{}", "functions.zoom:0")], "call functions.zoom:0")
    assert result.calls[0].id == "functions.zoom:0"


@dataclass
class Tool:
    name: str = "zoom"
    description: str = "Enlarge the cell at x."
    parameters: dict[str, Any] = field(default_factory=lambda: TOOL["function"]["parameters"])  # type: ignore[index]


def test_a_tool_in_the_format_of_templates_and_parsers() -> None:
    assert as_function(Tool()) == TOOL
