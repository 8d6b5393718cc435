"""Chat templates in the style of well-known families, and small tokenizers with their control tokens."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vlmrl.plugins import Processor
from vlmrl.processors.text import TextProcessor

_TEXT = (
    "{%- macro show(content) %}{%- if content is string %}{{- content }}{%- else %}{%- for part in content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}"
)

CHATML = (
    _TEXT
    + """\
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' }}{{- show(message.content) }}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

QWEN2_5_VL = (
    _TEXT
    + """\
{%- for message in messages %}
  {%- if loop.first and message.role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
  {%- endif %}
  {{- '<|im_start|>' + message.role + '\\n' }}{{- show(message.content) }}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""Shows no tools."""

QWEN3 = (
    _TEXT
    + """\
{%- if tools %}
  {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
  {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
  {{- '\\n</tools>\\nWrite <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last_question=0) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{%- set state.last_question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- set content = show(message.content) %}
    {%- set thought = '' %}
    {%- if '</think>' in content %}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thought and loop.index0 > state.last_question %}
      {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' }}{{- show(message.content) }}{{- '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' }}{{- show(message.content) }}{{- '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""Removes the thinking of responses before the last user message; results of tools are no user message."""

THINKING = QWEN3.replace(
    "'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
"""The same with prompts that end inside the thinking, as those of thinking models do."""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- set state = namespace(tools=tools) %}
{%- for message in messages %}
  {%- set role = 'ipython' if message.role == 'tool' else message.role %}
  {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
  {%- if state.tools and message.role == 'user' %}
    {{- 'Respond with {"name": ..., "parameters": ...}.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {%- set state.tools = none %}
  {%- endif %}
  {%- if message.role == 'tool' %}{{- message.content | tojson }}{%- else %}{{- message.content | trim }}{%- endif %}
  {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
"""Content is text only, and without the spaces at its ends."""

MISTRAL = """\
{{- '<s>' }}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
    {{- '[INST]' + message.content + '[/INST]' }}
  {%- elif message.role == 'system' %}
    {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
  {%- elif message.role == 'tool' %}
    {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
      {{- raise_exception('ids of tool calls have nine characters') }}
    {%- endif %}
    {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
  {%- else %}
    {{- message.content + '</s>' }}
  {%- endif %}
{%- endfor %}"""
"""Shows the tools before the last user message; a response follows without a beginning."""

GEMMA = """\
{{- '<bos>' }}
{%- for message in messages %}
  {%- if message.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
  {%- set role = 'model' if message.role == 'assistant' else message.role %}
  {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3": QWEN3,
    "thinking": THINKING,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}
ENDS = {
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "mistral": ("</s>", "<pad>"),
    "gemma": ("<end_of_turn>", "<eos>"),
}
"""End tokens, that of the template first; `<|im_end|>` and `<|endoftext|>` of the others."""
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_QWEN = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_SPECIAL = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    "mistral": (
        *("<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
        *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
    ),
    "gemma": ("<bos>", "<start_of_turn>"),
}
_MERGES = ("t h", "th e", "i n", "in g", "e r", "o n", "a n", "an d", "Ċ Ċ", "Ġ t", "Ġ the", "u s", "us er", "6 5")
TOOL = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Enlarge the cell at x.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


def tokenizer_with_merges(style: str) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and some merges, with the control tokens of a family and its chat template."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    merges = [tuple(merge.split()) for merge in _MERGES]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=8192)
    tokenizer.add_tokens([*_ends(style), *_SPECIAL.get(style, _QWEN)], special_tokens=True)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"], special_tokens=False)
    tokenizer.eos_token = _ends(style)[0]
    tokenizer.chat_template = TEMPLATES[style]
    return tokenizer


def text_processor(style: str) -> Processor:
    tokenizer = tokenizer_with_merges(style)
    ends: Any = tokenizer.convert_tokens_to_ids(list(_ends(style)))
    return TextProcessor(tokenizer, eos_token_ids=tuple(ends))


def _ends(style: str) -> Sequence[str]:
    return ENDS.get(style, _QWEN_ENDS)
