"""Look up plugin files by name, and load the processor of a model."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from vlmrl.config.data import Columns
from vlmrl.errors import ConfigError
from vlmrl.types import Ints, Media, Sample
from vlmrl.video_size import Size

if TYPE_CHECKING:
    from PIL.Image import Resampling
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

ParameterGroup = Literal["vision", "projector", "language"]

MODEL_FLAG = "actor.model_name_or_path"
"""The setting that names the model, for messages, in all verbs but `merge`."""
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
ONLY_SAFETENSORS = (
    "pickled weights can run code when they are loaded, so vlmrl reads only *.safetensors: take a version of the "
    "model that has them, or write one with save_pretrained() of Transformers where you trust the files"
)
"""The advice for a model without safetensors, for messages."""
ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file in the folder of every adapter."""
_TOKENIZER_FILES = ("tokenizer.*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Every folder with a tokenizer has at least one of them."""


@dataclass(frozen=True, slots=True)
class BridgeReport:
    """What the chat template of a model does with conversations of several turns."""

    shows_tools: bool
    """It writes the tools into the prompt. If not, they are in the system prompt, in Hermes' format."""
    has_system_role: bool
    """It takes system messages. If not, tools are in the first user message."""
    has_tool_role: bool
    """Results of tools are messages of the role `tool`. If not, they are user messages, in Hermes' format."""
    images_in_tool_role: bool
    """Messages of the role `tool` may have images. If not, a user message behind them has the images."""
    rewrites_history: str | None
    """How it changes earlier responses when it renders a conversation again: `removes the thinking of earlier
    responses`; None: not at all."""
    history_problem: str | None
    """Why a conversation cannot be rendered again, as `agent.history template` does; None: it can."""

    def notes(self, *, history: Literal["keep", "template"], has_tools: bool) -> tuple[str, ...]:
        """Return what users should know at the start of a run, a line each.

        Raises ConfigError when the chat template cannot do what `agent.history` asks for.
        """
        if history == "template" and self.history_problem is not None:
            raise ConfigError(
                f"agent.history template: the model's chat template cannot render a conversation again "
                f"({self.history_problem}): set agent.history keep"
            )
        notes = []
        if self.rewrites_history is not None:
            follows = (
                "agent.history keep: they stay in the conversation as they were sampled"
                if history == "keep"
                else "agent.history template: a new segment begins there"
            )
            notes.append(f"the model's chat template {self.rewrites_history}; {follows}")
        if has_tools and not self.shows_tools:
            notes.append("the model's chat template shows no tools: they are in the system prompt, in Hermes' format")
        elif has_tools and not self.has_tool_role:
            notes.append("the model's chat template takes no results of tools by themselves: they are user messages")
        return tuple(notes)


class History(NamedTuple):
    """A conversation behind its first prompt, as the chat template renders it."""

    text: str
    beginning: str
    """Text of the first prompt's end that `text` replaces: the beginning of a response."""
    is_rewritten: bool
    """`text` is not what stands already: the earlier text, the last response and its bridge."""


class Processor(Protocol):
    """Turns text and images into the inputs of one model family. Each family has a file in `processors/`."""

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response; supervised training appends the first one."""
    banned_tokens: tuple[int, ...]
    """Tokens that must never be sampled, because the model expects an image for each."""
    resize_factor: int | None
    """Images are resized to multiples of this many pixels. None: the model takes no images."""
    resample: Resampling
    """Filter that resizes images, the family's own."""
    frame_factor: int | None
    """Videos have a multiple of this many frames. None: the model takes no videos."""
    attends_both_ways: bool
    """Tokens of an image attend to each other in both directions, in the language model."""
    min_pixels: int
    max_pixels: int
    resize_settings: str
    """All settings that affect resizing; part of the hash of every image."""
    engine_kwargs: dict[str, Any]
    """`mm_processor_kwargs` for vLLM, so that it sees images exactly as the trainer does."""

    def render(
        self,
        question: str | Sequence[Mapping[str, Any]],
        *,
        num_images: int,
        columns: Columns,
        tools: Sequence[Mapping[str, Any]] = (),
        literal: bool = False,
    ) -> str:
        """Render a question as the text that the model reads, with one placeholder per image.

        `tools` are functions in OpenAI's format, which the chat template shows or the system prompt has.
        With `literal`, `<image>` is plain text, image parts alone mark images, and messages may be a whole conversation
        with results of tools, which are shown as by `bridge`.

        In a row with images, `<image>` in a string or a part `{"type": "image"}` marks the place of an image; without
        any mark, all images come first. For a model without images, and where `columns.image_key` is None, `<image>` is
        plain text. Text of the question that looks like a special token is escaped, so that `encode` does not read it
        as one.

        Raises DataError when images and placeholders do not match, ConfigError when the model has no chat template.
        """

    def messages(
        self,
        question: str | Sequence[Mapping[str, Any]],
        *,
        num_images: int,
        columns: Columns,
        literal: bool = False,
    ) -> Sequence[Mapping[str, Any]]:
        """Return the messages that `render` renders, with the system prompt of `columns`.

        The content of each is a list of parts: text, and `{"type": "image"}` or `{"type": "video"}` in place of each
        image and video, which `num_images` counts together.

        Raises DataError as `render` does.
        """

    def readable(self, text: str) -> str:
        """Remove the escapes from a rendered prompt, for users and reward functions."""

    def encode(self, text: str, sizes: Sequence[Size]) -> tuple[Ints, Ints]:
        """Tokenize a rendered prompt: first as the model reads it, then with one placeholder per image or video (for
        vLLM).

        `sizes` are those of its images and videos, in order. Raises DataError when the numbers of placeholders and
        images differ.
        """

    def decode(self, tokens: Ints) -> str:
        """Decode [T] to text, without special tokens."""

    def bridge(
        self, messages: Sequence[Mapping[str, Any]], sizes: Sequence[Size], *, last_token: int | None
    ) -> tuple[Ints, Ints]:
        """Return the tokens between a sampled response and the next one, in the two forms of `encode`.

        They are the response's end of turn, the messages, and the beginning of the next response. Where `last_token`,
        the last one of the response, is that end of turn, it is left out. Messages are of the roles `user` and `tool`,
        their content is a list of text and image parts, and `sizes` are those of their images. Text that looks like a
        special token is escaped.
        """

    def check_bridge(self) -> BridgeReport:
        """Return what the chat template does with conversations. Raises ConfigError when `bridge` cannot work."""

    def history(
        self, earlier: str | None, responses: Sequence[Ints], feedback: Sequence[Sequence[Mapping[str, Any]]]
    ) -> History:
        """Render a conversation again, as the chat template shows it behind the first prompt.

        `responses` are the sampled tokens of each response, and `feedback[k]` are the messages behind response k.
        `earlier` is the text of the history before the last response, as an earlier call returned it; None: there is
        one response.

        Raises DataError when the template rejects the conversation.
        """

    def target_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (width, height) that an image is resized to. The family's own resizing changes it no further.

        Raises DataError when no size fits.
        """

    def pixel_inputs(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for these images and videos, in order: `pixel_values` [P, C] and
        `image_grid_thw` [n, 3], or, if a tower takes tiles, `pixel_values` [tiles, 3, height, width] and
        `image_tiles` [n], the tiles of each image.

        Without images there are no `pixel_values`.
        """

    def token_types(self, tokens: Ints) -> Ints:
        """Return the type of each token, [T]: 0 text, 1 image, 2 video."""

    def grid(self, size: Size) -> tuple[int, int, int]:
        """Return the number of patches in time, height and width of an image or a video."""

    def num_tokens(self, size: Size) -> int:
        """Return the number of image or video tokens of an image or a video."""

    def expansion(self, size: Size) -> Ints:
        """Return the tokens that the model reads in place of one placeholder: image tokens, or those of a video and the
        text between them."""

    def collapsed(self, tokens: Ints, last: Ints, sizes: Sequence[Size]) -> Ints:
        """Return the tokens with one placeholder per image or video: the second form of `encode`.

        `last` are the positions of the last token of each, `sizes` their sizes.
        """

    def video_positions(self, tokens: Ints, sizes: Sequence[Size]) -> Ints:
        """Return the M-RoPE positions, [3, T], of tokens with these images and videos, at least one of them a video."""

    def image_text(self, kind: str = "image") -> str:
        """Return the text that stands for an image (or a `video`) in a prompt."""

    def dummy_sample(self) -> Sample | None:
        """Return the smallest sample with an image, without sampled tokens; None when the model takes no images."""

    def parameter_group(self, name: str) -> ParameterGroup:
        """Return the part of the model that a Hugging Face parameter name belongs to."""

    def save(self, folder: Path) -> None:
        """Write tokenizer and processor files, so that `folder` loads by itself."""


def plugin(kind: Literal["processors", "datasets"], name: str) -> ModuleType:
    """Import `vlmrl.<kind>.<name>`. Raises ConfigError with the existing names if there is no such file."""
    names = plugin_names(kind)
    if name not in names:
        raise ConfigError(f"no file {kind}/{name}.py; there are: {', '.join(names)}")
    return import_module(f"vlmrl.{kind}.{name}")


def plugin_names(kind: Literal["processors", "datasets"]) -> list[str]:
    """Return the files of a plugin folder, without `.py`."""
    folder = import_module(f"vlmrl.{kind}")
    return sorted(module.name for module in pkgutil.iter_modules(folder.__path__))


def processor_of(path: str, columns: Columns, *, trust_remote_code: bool = False, flag: str = MODEL_FLAG) -> Processor:
    """Load the processor of a model with the image sizes of the settings.

    Raises ConfigError also if no frame of a video can have the sizes of the settings.
    """
    loaded = processor(
        path,
        min_pixels=columns.min_pixels,
        max_pixels=columns.max_pixels,
        trust_remote_code=trust_remote_code,
        flag=flag,
    )
    if columns.video_key is not None and loaded.resize_factor is not None:
        area, least = loaded.resize_factor**2, columns.video_min_pixels
        if -(-least // area) > max(columns.video_max_pixels, int(least * 1.05)) // area:
            side, most = loaded.resize_factor, columns.video_max_pixels
            raise ConfigError(
                f"data.video_min_pixels {least} and data.video_max_pixels {most}: no frame of whole {side}x{side} "
                f"patches ({area} pixels) lies between them"
            )
    return loaded


def check_same_inputs(other: Processor, actor_processor: Processor, *, what: str, actor: str) -> None:
    """Check that another model reads the actor's tokens and images.

    `what` is the model with the setting that named it, and `actor` the actor's path, for the message.

    Raises ConfigError if its vocabulary or image settings differ.
    """
    has_same_tokens = other.tokenizer.get_vocab() == actor_processor.tokenizer.get_vocab()
    has_same_images = (other.resize_factor, other.resize_settings) == (
        actor_processor.resize_factor,
        actor_processor.resize_settings,
    )
    if has_same_tokens and has_same_images:
        return
    hint = " (a reward model of another family can be served by vlmrl serve-rm, for reward.remote_url)"
    raise ConfigError(
        f"{what} reads other {'images' if has_same_tokens else 'tokens'} than {actor}, whose responses it gets: use a "
        f"model of the same family{hint if what.startswith('reward.') else ''}"
    )


def processor(
    path: str, *, min_pixels: int, max_pixels: int, trust_remote_code: bool = False, flag: str = MODEL_FLAG
) -> Processor:
    """Load the processor of the model in `path` (a folder or Hub id), by the file that lists its model type, or `text`.

    Args:
        flag: the setting that named the model, for messages.

    Raises ConfigError when the model does not exist, its files cannot be read, or its weights are pickled.
    """
    from transformers import AutoConfig

    path = located(path, flag=flag)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{flag}: {path} is not a model that can be read: {first_line(error)}") from error
    if not trust_remote_code:  # code that comes with a model may keep its tokenizer in any file
        _check_tokenizer(Path(path), flag)
    modules = [plugin("processors", name) for name in plugin_names("processors")]
    families = [module for module in modules if config.model_type in module.MODEL_TYPES]
    family = families[0] if families else plugin("processors", "text")
    try:
        loaded = family.load(
            path, config=config, min_pixels=min_pixels, max_pixels=max_pixels, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer or processor of {path} cannot be read: {first_line(error)}") from error
    return cast("Processor", loaded)


def located(path: str, *, flag: str = MODEL_FLAG) -> str:
    """Return the folder of a local model, or the Hub id as it is.

    Raises ConfigError for a folder that does not exist, that holds an adapter or a run instead of a model, or whose
    weights are pickled.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if looks_local(path):
            raise ConfigError(f"{flag}: there is no folder {path}")
        return path
    if (folder / "config.json").is_file():
        refuse_pickles(folder, flag=flag)
        return str(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{flag}: {path} holds an adapter and no model: merge it into its base first, with vlmrl merge "
            f"--merge.adapter {path} --merge.output FOLDER, and give that folder; to continue its training, give its "
            f"base, and {path} as actor.adapter_name_or_path"
        )
    if (folder / "model" / "config.json").is_file():
        raise ConfigError(f"{flag}: {path} is the folder of a run: its model is in {folder / 'model'}")
    if (folder / "adapter" / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{flag}: {path} is the folder of a run, which trained an adapter: merge it into its base first, with "
            f"vlmrl merge --merge.adapter {folder / 'adapter'} --merge.output FOLDER, and give that folder"
        )
    return str(folder)


def _check_tokenizer(folder: Path, flag: str) -> None:
    """Raise ConfigError when a model's folder holds no tokenizer: Transformers would create an empty one."""
    if folder.is_dir() and not any(list(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ConfigError(
            f"{flag}: there is no tokenizer in {folder}: copy tokenizer.json, tokenizer_config.json and the other "
            "small files from the model that it was made from"
        )


def refuse_pickles(folder: Path, *, flag: str) -> None:
    """Raise ConfigError for a model with pickled weights only. `flag` is the setting that named it."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = next((file for pattern in _PICKLES for file in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise ConfigError(f"{flag}: {folder} holds {pickled.name} and no *.safetensors: {ONLY_SAFETENSORS}")


def looks_local(path: str) -> bool:
    """Whether this can only be a path on this machine, not a Hub id."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
