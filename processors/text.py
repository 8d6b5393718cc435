"""Processor of text models: any causal language model with a tokenizer. Base of the other families."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrl.config.data import Columns
from vlmrl.data.chat_template import ChatTemplate, Message, Tool
from vlmrl.data.deadline import OverdueError, call_within
from vlmrl.data.no_images import NoImages
from vlmrl.data.question import PlacedText
from vlmrl.errors import ConfigError, DataError
from vlmrl.plugins import History
from vlmrl.system.plain_text import one_line
from vlmrl.types import Ints
from vlmrl.video_size import Size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from vlmrl.plugins import BridgeReport, ParameterGroup

MODEL_TYPES: tuple[str, ...] = ()  # models of types that no other file lists belong to this family
_UNPROVEN = ("qwen3_5_moe",)
"""Models with images that would be taken for text models."""

# Two Unicode noncharacters, which valid text does not contain. They mark text of a dataset that looks like a special
# token (`<|im_end|>`, `<|image_pad|>`), so that it is encoded as plain text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)
_WITHOUT_MARKS = str.maketrans("", "", _OPEN + _CLOSE)

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles allowed in messages. A chat template inserts the role between its control tokens unescaped."""

_MAX_OVERDUE = 3
"""Rows on which the chat template may exceed its time limit before the run ends."""


class TextProcessor(NoImages):
    """See `vlmrl.plugins.Processor`."""

    template_limit_s: float = 10.0
    """Seconds of CPU time to apply the chat template to one row; the template is code that comes with the model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = eos_token_ids[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        self.engine_kwargs: dict[str, Any] = {}
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = any_of(special)
        self._special_ids = np.array(sorted(tokenizer.convert_tokens_to_ids(list(special))), dtype=np.int64)
        self._vision: re.Pattern[str] | None = None
        self._num_overdue = 0
        encoded = tokenizer("").input_ids
        self._bos = tokenizer.bos_token if encoded and encoded[0] == tokenizer.bos_token_id else ""

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template in conversations of several turns."""
        return ChatTemplate(self._apply_template, image_text=self.image_text() if self.resize_factor else None)

    def render(
        self,
        question: str | Sequence[Mapping[str, Any]],
        *,
        num_images: int,
        columns: Columns,
        tools: Sequence[Tool] = (),
        literal: bool = False,
    ) -> str:
        messages = self.messages(question, num_images=num_images, columns=columns, literal=literal)
        if literal:
            messages = self.template.as_taken(messages)
        if columns.apply_chat_template:
            return self.template.prompt(messages, self._mark_all(list(tools)))
        if tools:
            raise ConfigError("tools need the model's chat template: set data.apply_chat_template to true")
        return self._render_plain(question, messages, columns)

    def messages(
        self,
        question: str | Sequence[Mapping[str, Any]],
        *,
        num_images: int,
        columns: Columns,
        literal: bool = False,
    ) -> list[Message]:
        messages = conversation(question, columns.system_prompt)
        if not literal:
            return self.place_images(messages, num_images, reads_images=columns.image_key is not None)
        if not num_images:
            refuse_image_parts(messages)
        return messages

    def readable(self, text: str) -> str:
        return text.translate(_WITHOUT_MARKS)

    def encode(self, text: str, sizes: Sequence[Size]) -> tuple[Ints, Ints]:
        if sizes:
            raise DataError(f"the prompt has {len(sizes)} images, but the model takes text only")
        tokens = self.token_ids(text)
        return tokens, tokens

    def decode(self, tokens: Ints) -> str:
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def bridge(
        self, messages: Sequence[Mapping[str, Any]], sizes: Sequence[Size], *, last_token: int | None
    ) -> tuple[Ints, Ints]:
        tokens, request = self.encode(self.template.after_response([dict(m) for m in messages]), sizes)
        num_end = self._num_end_of_turn(request, last_token)
        return tokens[num_end:], request[num_end:]

    def check_bridge(self) -> BridgeReport:
        return self.template.report

    def history(
        self, earlier: str | None, responses: Sequence[Ints], feedback: Sequence[Sequence[Mapping[str, Any]]]
    ) -> History:
        beginning = self.template.beginning
        texts = [self._response_text(response) for response in responses]
        messages = [[dict(m) for m in follows] for follows in feedback]
        stands = (beginning if earlier is None else earlier) + texts[-1] + self.template.after_response(messages[-1])
        text = self.template.history(texts, messages)
        return History(text, beginning, is_rewritten=text != stands)

    def parameter_group(self, name: str) -> ParameterGroup:
        return "language"

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def place_images(self, messages: list[Message], num_images: int, *, reads_images: bool) -> list[Message]:
        """Convert image placeholders to image parts.

        With `reads_images` False the run reads no images on purpose, and `<image>` is plain text.

        Raises:
            DataError: the placeholders do not match the images.
        """
        del reads_images  # `<image>` is always plain text for a text model
        if num_images:
            raise DataError(f"the row has {num_images} images, but the model takes text only")
        refuse_image_parts(messages)
        return messages

    def token_ids(self, text: str) -> Ints:
        """Encode a rendered text to token ids [T]. Marked text is encoded as plain text."""
        ids: list[int] = []
        for i, piece in enumerate(_MARKED.split(text)):
            is_marked = i % 2 == 1
            if piece:
                encoded = self.tokenizer(piece, add_special_tokens=False, split_special_tokens=is_marked).input_ids
                if is_marked and self.tokenizer.convert_tokens_to_ids(piece) in encoded:
                    raise DataError(
                        f"the text {piece!r} cannot be encoded differently from the model's special token of that name"
                    )
                ids += encoded
        return np.array(ids, dtype=np.int64)

    def _num_end_of_turn(self, tokens: Ints, last_token: int | None) -> int:
        """Return how many leading tokens of a bridge the response has already: its end token, and spaces before it."""
        ends = np.flatnonzero(np.isin(tokens, self.eos_token_ids))
        if last_token is None or not len(ends) or tokens[ends[0]] != last_token:
            return 0
        return 0 if self.tokenizer.decode(tokens[: ends[0]].tolist()).strip() else int(ends[0]) + 1

    def _response_text(self, tokens: Ints) -> str:
        """Decode a response for a chat template, without its end token: control tokens that it has stay such tokens."""
        if len(tokens) and int(tokens[-1]) in self.eos_token_ids:
            tokens = tokens[:-1]
        is_special = np.isin(tokens, self._special_ids)
        runs = np.split(tokens, np.flatnonzero(is_special[1:] | is_special[:-1]) + 1)
        return "".join(
            text if len(run) == 1 and run[0] in self._special_ids else _mark_text(text, self._special)
            for run in runs
            if (text := str(self.tokenizer.decode(run.tolist(), clean_up_tokenization_spaces=False)))
        )

    def _apply_template(self, messages: Sequence[Message], tools: Sequence[Tool], begin: bool) -> str:
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                "the model's tokenizer has no chat template: set data.apply_chat_template to false and "
                "data.input_template to a prompt template"
            )
        marked = [
            self._mark_all({key: value for key, value in m.items() if key not in ("role", "content")})
            | {"role": m["role"], "content": self._marked_content(m["content"])}
            for m in messages
        ]
        more: dict[str, Any] = {"tools": list(tools)} if tools else {}
        apply = partial(self.tokenizer.apply_chat_template, marked, tokenize=False, add_generation_prompt=begin, **more)
        try:
            return str(call_within(self.template_limit_s, apply))
        except OverdueError as error:
            self._num_overdue += 1
            message = f"the model's chat template is {error}"
            if self._num_overdue >= _MAX_OVERDUE:
                raise ConfigError(
                    f"{message}, on {self._num_overdue} rows: fix it, or set data.apply_chat_template to false"
                ) from error
            raise DataError(message) from error
        except Exception as error:  # jinja's errors, and those that a template raises about roles
            raise DataError(f"the model's chat template rejects the messages: {error}") from error

    def _marked_content(self, content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return content
        return _content([self._mark(part, self._special) for part in _joined(content)])

    def _render_plain(self, question: object, messages: list[Message], columns: Columns) -> str:
        if not isinstance(question, str | PlacedText):
            raise DataError("the row holds chat messages, which need data.apply_chat_template")
        template = columns.input_template
        # Without a template the row is the whole prompt: its control tokens are special, except vision tokens.
        pattern = self._vision if template is None else self._special
        parts = [
            self._mark(part, pattern)
            for message in messages
            if message["role"] == "user"
            for part in message["content"]
        ]
        text = "".join(part["text"] if part["type"] == "text" else self.image_text(part["type"]) for part in parts)
        if template is not None:
            text = template.replace("{}", text, 1)
        if columns.system_prompt is not None:
            text = f"{columns.system_prompt}\n\n{text}"
        return self._bos + text

    def _mark(self, part: Mapping[str, Any], pattern: re.Pattern[str] | None) -> dict[str, Any]:
        if part["type"] != "text":
            return dict(part)
        return {"type": "text", "text": _mark_text(part["text"], pattern)}

    def _mark_all(self, value: Any) -> Any:
        """Mark special tokens in all nested strings: names, tool calls, reasoning, anything a template may insert."""
        if isinstance(value, str):
            return _mark_text(value, self._special)
        if isinstance(value, Mapping):
            return {self._mark_all(key): self._mark_all(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark_all(inner) for inner in value]
        return value


def load(
    path: str, *, config: PretrainedConfig, min_pixels: int, max_pixels: int, trust_remote_code: bool
) -> TextProcessor:
    """Load the processor of a text model. Raises ConfigError for a model with images that is known to be unproven."""
    if config.model_type in _UNPROVEN:
        raise ConfigError(
            f"{path} is a {config.model_type}, whose images are not proven here: use a dense model, of type qwen3_5"
        )
    del min_pixels, max_pixels  # bounds on images, which a text model does not take
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    return TextProcessor(tokenizer, eos_token_ids=end_tokens(path, config, tokenizer))


def end_tokens(path: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's, then those of the generation config or model config."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model need not have a generation config
        ends = config.get_text_config().eos_token_id
    candidates = [tokenizer.eos_token_id, *(ends if isinstance(ends, list | tuple) else [ends])]
    ids = tuple(dict.fromkeys(int(token) for token in candidates if token is not None))
    if not ids:
        raise ConfigError(f"neither the tokenizer nor the generation config of {path} has an end token")
    return ids


def conversation(question: str | Sequence[Mapping[str, Any]], system_prompt: str | None) -> list[Message]:
    """Convert a question to messages whose content is a list of text and image parts; DataError if it is invalid."""
    turns: Any = [{"role": "user", "content": question}] if isinstance(question, str) else question
    if not isinstance(turns, Sequence) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"the question is neither text nor a list of chat messages, but {type(question).__name__}")
    messages = [_message(turn) for turn in turns]
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "the chat messages end with an assistant message: there is no question to respond to; leave that message "
            "out, or put it into the column data.label_key as the expected response"
        )
    if system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system_prompt}]})
    return messages


def refuse_image_parts(messages: Sequence[Message]) -> None:
    """Raise DataError when messages of a row without images have an image part, or one of a video."""
    kinds = {part["type"] for message in messages for part in message["content"]}
    if "image" in kinds:
        raise DataError("the chat messages have an image part, but the row has no images")
    if "video" in kinds:
        raise DataError("the chat messages have a video part, but the row has no videos")


def _message(message: Mapping[str, Any]) -> Message:
    content = message.get("content")
    if "role" in message and "content" in message and content is None:
        raise DataError("a chat message has no content (null)")
    if "role" not in message or content is None:
        raise DataError(f"a chat message needs role and content, but this one has: {', '.join(map(str, message))}")
    parts = [content] if isinstance(content, str | Mapping) else content
    if not isinstance(parts, Sequence):
        raise DataError(
            f"the content of a chat message is neither text nor a list of parts, but {type(content).__name__}"
        )
    # Arrow fills keys that only other rows have with None.
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    if role not in ROLES:
        shown = one_line(repr(role), max_chars=80)
        raise DataError(f"a chat message has the role {shown}; allowed are {', '.join(ROLES)}")
    return fields | {"content": [_part(part) for part in parts]}


def _part(part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in ("image", "video"):
        return {"type": kind}
    raise DataError(f"a chat message has a part of type {kind!r}; allowed are text, image and video")


def _mark_text(text: str, pattern: re.Pattern[str] | None) -> str:
    """Put marks around the matches of the pattern, after removing any marks from the text."""
    text = text.translate(_WITHOUT_MARKS)
    return text if pattern is None else pattern.sub(lambda match: f"{_OPEN}{match[0]}{_CLOSE}", text)


def _joined(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring text parts, in which a special token may be split."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(dict(part))
    return joined


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Join text-only parts to a string, which every chat template accepts."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def any_of(tokens: set[str]) -> re.Pattern[str] | None:
    """Compile a pattern for any of these strings, longest first; None for no strings."""
    longest_first = sorted(tokens - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
