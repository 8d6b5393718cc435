import pytest
from chat_templates import GEMMA, LLAMA3, QWEN3, TOOL, tokenizer_with_merges

from vlmrl.errors import ConfigError
from vlmrl.rollout.tool_parsers import tool_format, vllm_tool_parser


@pytest.mark.parametrize(
    ("template", "shows_tools", "expected"),
    [
        (QWEN3, True, "hermes"),
        (LLAMA3, True, "llama3_json"),
        ("{{ tools }}[TOOL_CALLS]", True, "mistral"),
        ("{{ tools }}<tool_call>\n<function=example>", True, "qwen3_coder"),
        ("{{ tools }}", True, "hermes"),
        (GEMMA, False, "hermes"),
        ("ipython", False, "hermes"),  # the system prompt asks for Hermes' format
        (None, False, "hermes"),
    ],
)
def test_auto_is_the_format_of_the_chat_template(template: str | None, shows_tools: bool, expected: str) -> None:
    assert tool_format("auto", template, shows_tools=shows_tools) == expected
    assert tool_format("pythonic", template, shows_tools=shows_tools) == "pythonic"


def test_every_format_that_auto_may_choose_is_one_of_vllms() -> None:
    from vllm.tool_parsers import ToolParserManager

    from vlmrl.rollout.tool_parsers import _FORMATS

    assert {name for _, name in _FORMATS} <= set(ToolParserManager.lazy_parsers)


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"agent\.tool_format nope: vLLM has no such .*: auto, .*hermes"):
        vllm_tool_parser("nope", tokenizer_with_merges("qwen3"), [TOOL])


def test_a_format_whose_tokens_the_model_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"llama3_json does not fit the model's tokenizer: .*python_tag"):
        vllm_tool_parser("llama3_json", tokenizer_with_merges("qwen3"), [TOOL])


def test_arguments_have_the_types_of_the_schema() -> None:
    parser = vllm_tool_parser("qwen3_coder", tokenizer_with_merges("qwen3"), [TOOL])
    text = "<tool_call>\n<function=zoom>\n<parameter=x>\n12\n</parameter>\n</function>\n</tool_call>"
    assert [(call.name, call.arguments) for call in parser(text)] == [("zoom", '{"x": 12}')]
    assert parser("none") == []
