"""Read settings from YAML files and flags, each with its origin, before validation."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

_TRUE_OR_FALSE = {
    "true": True,
    "false": False,
    "yes": True,
    "no": False,
    "on": True,
    "off": False,
    "1": True,
    "0": False,
}


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A setting that the user gave."""

    value: Any
    origin: str
    """`--train.seed`, or `run.yaml:7`."""
    shown: str
    """The value as the user wrote it, for messages."""


@dataclass(frozen=True, slots=True)
class UnknownName:
    """A name in the user's input that is no setting."""

    name: str
    origin: str
    is_section: bool = False
    """The name has settings below it: probably a misspelt section."""


@dataclass(slots=True)
class UserInput:
    """All settings that the user gave. Later sources override earlier ones, setting by setting."""

    given: dict[str, GivenValue]
    unknown: list[UnknownName]
    mistakes: list[str]
    unreadable: set[str]
    """Settings whose value could not be read."""


def read(argv: Sequence[str], known: Mapping[str, FieldInfo], sections: Iterable[str]) -> UserInput:
    """Read `--config` files in order, then the other flags. Mistakes are collected, not raised."""
    user_input = UserInput({}, [], [], set())
    files, flags = _split(argv, user_input)
    for file in files:
        _read_yaml(Path(file), known, frozenset(sections), user_input)
    for flag, words in flags:
        _read_flag(flag, words, known, user_input)
    return user_input


def _split(argv: Sequence[str], user_input: UserInput) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Split the command line into YAML files, and flags with the words that follow them."""
    flags: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            flag, equals, text = word.partition("=")
            flags.append((flag, [text] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            user_input.mistakes.append(f"{word}: a setting is given as --section.name value")
    files = []
    for flag, words in flags:
        if flag == "--config" and len(words) == 1:
            files += words
        elif flag == "--config":
            user_input.mistakes.append(
                f"--config: takes one YAML file, not {len(words)}; give it again for another one"
            )
    return files, [(flag, words) for flag, words in flags if flag != "--config"]


def _read_flag(flag: str, words: list[str], known: Mapping[str, FieldInfo], user_input: UserInput) -> None:
    name = flag.removeprefix("--")
    field = known.get(name)
    if field is None:
        user_input.unknown.append(UnknownName(name, flag))
        return
    kind = without_none(field.annotation)
    if kind is bool and not words:
        words = ["true"]
    takes_several = any(get_origin(choice) in (tuple, list, dict) for choice in choices(kind))
    if not words:
        user_input.mistakes.append(f"{flag}: needs a value")
        user_input.unreadable.add(name)
    elif len(words) > 1 and not takes_several:
        user_input.unreadable.add(name)
        user_input.mistakes.append(
            f"{flag} {words[0]}: takes one value, but {' '.join(words[1:])!r} follows; quote a value with spaces"
        )
    else:
        optional = kind is not field.annotation
        user_input.given[name] = GivenValue(_from_words(words, kind, optional=optional), flag, " ".join(words))


def _from_words(words: list[str], kind: Any, *, optional: bool) -> Any:
    """Parse words of the command line as this type. Words that do not fit are returned for pydantic to refuse."""
    text = words[0]
    if optional and text.lower() in ("none", "null"):
        return None
    if kind is bool:
        return _TRUE_OR_FALSE.get(text.lower(), text)
    if get_origin(kind) in (tuple, list):
        # `0.9 0.95` as in OpenRLHF, or one word: `0.9,0.95`, `[0.9, 0.95]`, `(0.9, 0.95)`.
        return words if len(words) > 1 else [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]
    if get_origin(kind) is dict:
        try:
            return yaml.safe_load(" ".join(words))
        except (yaml.YAMLError, ValueError):  # YAML's reader lets the errors of dates and numbers through
            return text
    if len(words) > 1:
        return words
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if str(choice) == text), text)
    return text


def choices(kind: Any) -> tuple[Any, ...]:
    """`(str, int)` for `str | int`; a tuple of the type for any other."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def without_none(kind: Any) -> Any:
    """`int` for `int | None`; any other type unchanged."""
    rest = [choice for choice in choices(kind) if choice is not NoneType]
    if len(rest) == len(choices(kind)):
        return kind
    if len(rest) > 1:
        return Union[tuple(rest)]  # noqa: UP007, a union of runtime values
    return get_args(rest[0])[0] if hasattr(rest[0], "__metadata__") else rest[0]


def _read_yaml(file: Path, known: Mapping[str, FieldInfo], sections: frozenset[str], user_input: UserInput) -> None:
    try:
        loader = yaml.SafeLoader(_text(file))
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        user_input.mistakes.append(f"--config {file}: cannot be read: {reason}")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        user_input.mistakes.append(f"{file}{line}: not YAML: {getattr(error, 'problem', None) or error}")
    else:
        if root is not None:
            _Tree(file, loader, known, sections, user_input).read(root)
        return
    # The file may contain any setting: report none as missing, and compare none with its default.
    user_input.unreadable.update(known)


def _text(file: Path) -> str:
    """Decode a file. Windows writes UTF-16 from its shell, and UTF-8 with a byte order mark: the first bytes tell."""
    content = file.read_bytes()
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_wide else "utf-8-sig")


class _Tree:
    """Reader of one YAML file. It walks the nodes, because they have line numbers."""

    def __init__(
        self,
        file: Path,
        loader: yaml.SafeLoader,
        known: Mapping[str, FieldInfo],
        sections: frozenset[str],
        user_input: UserInput,
    ) -> None:
        self._file, self._loader, self._known, self._sections, self._user_input = (
            file,
            loader,
            known,
            sections,
            user_input,
        )
        self._lines: dict[str, int] = {}

    def read(self, node: yaml.Node, prefix: str = "") -> None:
        """Read the settings of a mapping, nested (`train: {seed: 1}`) or with full names (`train.seed: 1`)."""
        if not isinstance(node, yaml.MappingNode):
            # A section with all lines commented out is empty.
            if not (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
                subject = f"{prefix.rstrip('.')}: is a section" if prefix else "the file must contain sections"
                self._user_input.mistakes.append(
                    f"{self._at(node)}: {subject}: give its settings below it, `name: value`"
                )
            return
        self._loader.flatten_mapping(node)  # resolves `<<`
        for key, value in node.value:
            self._read_entry(f"{prefix}{key.value}", key, value)

    def _read_entry(self, name: str, key: yaml.Node, node: yaml.Node) -> None:
        if name in self._known:
            self._read_setting(name, key, node)
        elif name in self._sections:
            self.read(node, f"{name}.")
        else:
            self._user_input.unknown.append(
                UnknownName(name, self._at(key), is_section=isinstance(node, yaml.MappingNode))
            )

    def _read_setting(self, name: str, key: yaml.Node, node: yaml.Node) -> None:
        if name in self._lines:
            self._user_input.mistakes.append(f"{self._at(key)}: {name}: given twice, first in line {self._lines[name]}")
        self._lines[name] = key.start_mark.line + 1
        try:
            value = self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:  # the latter for a date such as 2026-02-30
            self._user_input.mistakes.append(f"{self._at(node)}: {name}: {getattr(error, 'problem', None) or error}")
            self._user_input.unreadable.add(name)
            return
        shown = node.value if isinstance(node, yaml.ScalarNode) else str(value)
        self._user_input.given[name] = GivenValue(value, self._at(key), shown)

    def _at(self, node: yaml.Node) -> str:
        return f"{self._file}:{node.start_mark.line + 1}"
