"""Finds what a name stands for: a model, the processor of its family, a dataset's rows."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from vlmrl.config.data import Columns
from vlmrl.errors import ConfigError
from vlmrl.types import Ints, Media, Sample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

ParameterGroup = Literal["vision", "projector", "language"]

MODEL_FLAG = "actor.model_name_or_path"
"""The setting that names the model, for messages, in all verbs but `merge`."""
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
ONLY_SAFETENSORS = (
    "pickled weights can run code when they are loaded, so vlmrl reads *.safetensors alone: take a version of the "
    "model that has them, or write one with save_pretrained() of Transformers where you trust the files"
)
"""What to do about a model without safetensors, for messages."""
ADAPTER_CONFIG = "adapter_config.json"
"""What PEFT calls the file that makes a folder an adapter's."""
_TOKENIZER_FILES = ("tokenizer.*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""One of them is in every folder with a tokenizer."""


class Processor(Protocol):
    """What a model family does to text and images before the model sees them. One file in `processors/` each."""

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    """Where a response ends; the first one is what a taught response is closed with."""
    banned_tokens: tuple[int, ...]
    """Tokens that sampling must never choose, because the model's forward would look for an image behind them."""
    resize_factor: int | None
    """Images are resized to multiples of so many pixels. None: the model takes no images."""
    min_pixels: int
    max_pixels: int
    resize_settings: str
    """All that decides how pixels are resized; part of the hash of every image."""
    engine_kwargs: dict[str, Any]
    """`mm_processor_kwargs` for vLLM, so that it sees images exactly as the trainer does."""

    def render(self, question: str | Sequence[Mapping[str, Any]], *, num_images: int, columns: Columns) -> str:
        """The text that the model reads, with one placeholder per image.

        `<image>` in a string or a part `{"type": "image"}` says where an image goes, in a row that has images; where
        nothing says it, all images go first. For a model that takes none, and where `columns.image_key` is None,
        `<image>` is text like any other. Text of the question that looks like a special token is marked, so that
        `encode` does not take it for one.

        Raises DataError when images and placeholders do not match, ConfigError when the model has no chat template.
        """

    def readable(self, text: str) -> str:
        """A rendered prompt without the marks, for people and reward functions."""

    def encode(self, text: str, sizes: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
        """A rendered prompt as tokens: first as the model reads it, then with one placeholder per image (for vLLM).

        `sizes` are the (width, height) of its images, in order. Raises DataError when there are more or fewer
        placeholders than images.
        """

    def decode(self, tokens: Ints) -> str:
        """[T] -> text, without special tokens."""

    def pixel_inputs(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """The model's arguments for these images, in order: `pixel_values` [P, C], `image_grid_thw` [n, 3]. {} for no
        image."""

    def token_types(self, tokens: Ints) -> Ints:
        """[T]: 0 text, 1 image, 2 video."""

    def grid(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Patches in time, height and width of an image of this (width, height): the work of the vision tower."""

    def num_tokens(self, size: tuple[int, int]) -> int:
        """Tokens that such an image takes in a prompt."""

    def dummy_sample(self) -> Sample | None:
        """The smallest sample with an image, nothing sampled; None when the model takes no images."""

    def parameter_group(self, name: str) -> ParameterGroup:
        """Which part of the model a Hugging Face parameter name belongs to."""

    def save(self, folder: Path) -> None:
        """Write tokenizer and processor files, so that `folder` loads by itself."""


def plugin(kind: Literal["processors", "datasets"], name: str) -> ModuleType:
    """Import `vlmrl.<kind>.<name>`, or raise ConfigError with the names that exist."""
    names = plugin_names(kind)
    if name not in names:
        raise ConfigError(f"no file {kind}/{name}.py; there are: {', '.join(names)}")
    return import_module(f"vlmrl.{kind}.{name}")


def plugin_names(kind: Literal["processors", "datasets"]) -> list[str]:
    """The files of a plugin folder, without `.py`."""
    folder = import_module(f"vlmrl.{kind}")
    return sorted(module.name for module in pkgutil.iter_modules(folder.__path__))


def processor_of(path: str, columns: Columns, *, trust_remote_code: bool = False, flag: str = MODEL_FLAG) -> Processor:
    """`processor` with the image sizes that the settings give."""
    return processor(
        path,
        min_pixels=columns.min_pixels,
        max_pixels=columns.max_pixels,
        trust_remote_code=trust_remote_code,
        flag=flag,
    )


def check_reads_alike(reader: Processor, actors: Processor, *, what: str, actor: str) -> None:
    """Make sure that a model beside the actor takes the actor's tokens and images for what they are.

    `what` is the model, with the setting that named it, and `actor` the actor's path: for the ConfigError.
    """
    is_alike = reader.tokenizer.get_vocab() == actors.tokenizer.get_vocab()
    if is_alike and (actors.resize_factor, actors.resize_settings) == (reader.resize_factor, reader.resize_settings):
        return
    thing = "images" if is_alike else "tokens"
    raise ConfigError(
        f"{what} reads other {thing} than {actor}, whose responses it is to judge: use a model of the same family (a "
        "reward model of another one can be served by vlmrl serve-rm, for reward.remote_url)"
    )


def processor(
    path: str, *, min_pixels: int, max_pixels: int, trust_remote_code: bool = False, flag: str = MODEL_FLAG
) -> Processor:
    """The processor of the model in `path` (a folder or Hub id): the file that lists its model type, else `text`.

    Args:
        flag: the setting that named the model, for messages.

    Raises ConfigError when there is no such model, when its files cannot be read, or when its weights are pickled.
    """
    from transformers import AutoConfig

    path = located(path, flag=flag)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{flag}: {path} is not a model that can be read: {first_line(error)}") from error
    if not trust_remote_code:  # code that comes with a model may keep its tokenizer wherever it likes
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
    """A model's folder as such, anything else as a Hub id.

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
            f"{flag}: {path} holds an adapter and no model: add it to its base first, with vlmrl merge --merge.adapter "
            f"{path} --merge.output FOLDER, and give that folder; to train it on, give its base, and {path} as "
            "actor.adapter_name_or_path"
        )
    if (folder / "model" / "config.json").is_file():
        raise ConfigError(f"{flag}: {path} is the folder of a run: its model is in {folder / 'model'}")
    if (folder / "adapter" / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{flag}: {path} is the folder of a run, which trained an adapter: add it to its base first, with vlmrl "
            f"merge --merge.adapter {folder / 'adapter'} --merge.output FOLDER, and give that folder"
        )
    return str(folder)


def _check_tokenizer(folder: Path, flag: str) -> None:
    """Raise ConfigError when a model's folder holds no tokenizer: Transformers would make an empty one up."""
    if folder.is_dir() and not any(list(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ConfigError(
            f"{flag}: there is no tokenizer in {folder}: copy tokenizer.json, tokenizer_config.json and what else the "
            "model that it was made of has beside its weights"
        )


def refuse_pickles(folder: Path, *, flag: str) -> None:
    """Raise ConfigError for a model whose weights are pickled and nothing else. `flag` is the setting that named it."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = next((file for pattern in _PICKLES for file in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise ConfigError(f"{flag}: {folder} holds {pickled.name} and no *.safetensors: {ONLY_SAFETENSORS}")


def looks_local(path: str) -> bool:
    """True for what can only be a path on this machine, never a Hub id."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
