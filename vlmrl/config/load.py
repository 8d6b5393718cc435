"""Load settings from YAML files and flags, and report all mistakes at once, each with its origin and a fix.

The command line is not parsed by tyro, which stops at the first kind of mistake, does not know the origin of a value
from a YAML file, and takes no explicit value for a switch, such as `--train.colocate_all false`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vlmrl.config.aliases import alias_of, explain
from vlmrl.config.base import ConflictError
from vlmrl.config.flags_and_yaml import GivenValue, UnknownName, UserInput, read, without_none
from vlmrl.config.help import default_of
from vlmrl.config.names import nearest, settings_named_in
from vlmrl.config.openrlhf import REFUSED, REFUSED_VALUES
from vlmrl.config.openrlhf_stages import REFUSED_BY_VERB
from vlmrl.config.refused import REFUSED_VALUES as OTHERS
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verb_list import VERBS
from vlmrl.errors import ConfigError

Config = TypeVar("Config", bound=VerbConfig)


def load(kind: type[Config], argv: Sequence[str]) -> Config:
    """Load the settings of a verb from the words that follow it on the command line.

    `--config FILE.yaml` may be given several times; a later file overrides an earlier one and flags override files,
    setting by setting.

    Raises:
        ConfigError: there are mistakes; the message has one line for each.
    """
    known = kind.settings()
    user_input = read(argv, known, kind.sections())
    intended = [_report_unknown(unknown, kind, user_input) for unknown in user_input.unknown]
    config = _Validator(kind, known, user_input, doubtful={*user_input.unreadable, *filter(None, intended)}).config()
    if user_input.mistakes:
        raise ConfigError(_report(user_input.mistakes))
    assert config is not None, "the settings are invalid, and no mistake was reported"
    return config


def _report(mistakes: Sequence[str]) -> str:
    if len(mistakes) == 1:
        return mistakes[0]
    return "\n  ".join([f"{len(mistakes)} mistakes in the settings", *mistakes])


def _report_unknown(unknown: UnknownName, kind: type[VerbConfig], user_input: UserInput) -> str | None:
    """Add the mistake of an unknown name; return the setting that was probably intended, if there is one."""
    dashes = "--" if unknown.origin.startswith("--") else ""
    here = unknown.origin if dashes else f"{unknown.origin}: {unknown.name}"
    refused = REFUSED_BY_VERB.get(kind.verb, {}).get(unknown.name) or REFUSED.get(unknown.name)
    if refused is not None:
        user_input.mistakes.append(f"{here}: {refused}")
        return None
    noun, names = "setting", list(kind.settings())
    if unknown.is_section or unknown.name in kind.sections():
        noun, names = "section", kind.sections()
    if unknown.name in names:
        user_input.mistakes.append(f"{here}: is a section: give its settings, {dashes}{unknown.name}.NAME value")
        return None
    suggestion = nearest(unknown.name, names)
    elsewhere = [other.verb for other in VERBS if unknown.name in (*other.settings(), *other.sections())]
    alias = alias_of(unknown.name, kind.settings())
    if elsewhere:
        user_input.mistakes.append(f"{here}: vlmrl {kind.verb} does not have it; vlmrl {elsewhere[0]} does")
    elif alias is not None:
        has = {other.verb: other.settings().keys() for other in VERBS}
        reason, suggestion = explain(alias, verb=kind.verb, dashes=dashes, has=has)
        user_input.mistakes.append(f"{here}: {reason}")
    elif suggestion is not None:
        user_input.mistakes.append(f"{here}: no such {noun}; did you mean {dashes}{suggestion}?")
    else:
        user_input.mistakes.append(f"{here}: no such {noun}, and none like it; `vlmrl {kind.verb} --help` lists them")
    return suggestion


class _Validator:
    """Validator that reports all mistakes, by validating again without the settings already known to be wrong.

    pydantic does not run checks of several settings while one of them is wrong by itself. So a wrong setting is
    reported and removed, and the rest is validated again. A failed check is not reported if it names a setting that is
    already in doubt.
    """

    def __init__(
        self, kind: type[VerbConfig], known: Mapping[str, FieldInfo], user_input: UserInput, *, doubtful: set[str]
    ) -> None:
        self._kind, self._known, self._user_input, self._doubtful = kind, known, user_input, doubtful
        self._values = {name: given.value for name, given in user_input.given.items()}

    def config(self) -> Any:
        """Return the valid settings, perhaps without the wrong ones; None if none remain valid."""
        while True:
            try:
                return self._kind.model_validate(_nest(self._values, self._kind.sections()))
            except ValidationError as error:
                before = dict(self._values)
                for detail in error.errors(include_url=False):
                    self._reject(detail, before)
                if self._values == before:
                    return None

    def _reject(self, detail: ErrorDetails, values: Mapping[str, Any]) -> None:
        name = self._setting(detail["loc"])
        if name is None:
            self._reject_conflict(detail)
        elif name not in values:
            self._reject_missing(name)
        elif name in self._values:  # report each value once
            self._user_input.mistakes.append(
                _wrong_value(name, self._known[name], self._user_input.given[name], detail)
            )
            self._doubtful.add(name)
            del self._values[name]

    def _reject_missing(self, name: str) -> None:
        if name not in self._doubtful:
            description = " ".join((self._known[name].description or "").split())
            self._user_input.mistakes.append(f"--{name} is missing: {description}")
        self._doubtful.add(name)
        self._values[name] = "?"  # a placeholder, so that the rest can be validated: every required setting is text

    def _reject_conflict(self, detail: ErrorDetails) -> None:
        error = detail.get("ctx", {}).get("error")
        for line in error.lines if isinstance(error, ConflictError) else [detail["msg"]]:
            names = settings_named_in(line, self._known)
            if not self._doubtful.intersection(names):
                origins = [self._user_input.given[name].origin for name in names if name in self._user_input.given]
                self._user_input.mistakes.append(line + (f" ({', '.join(dict.fromkeys(origins))})" if origins else ""))
            # A failed check in a section prevents the checks across sections: without its settings, those run.
            if detail["loc"]:
                self._doubtful.update(names)
                for name in names:
                    self._values.pop(name, None)

    def _setting(self, loc: tuple[int | str, ...]) -> str | None:
        """Return the setting that an error is about; None if it is about a section or several settings."""
        names = (".".join(map(str, loc[:length])) for length in range(1, len(loc) + 1))
        return next((name for name in names if name in self._known), None)


def _wrong_value(name: str, field: FieldInfo, given: GivenValue, detail: ErrorDetails) -> str:
    place = (
        f"{given.origin} {given.shown}" if given.origin.startswith("--") else f"{given.origin}: {name}: {given.shown}"
    )
    refused = (REFUSED_VALUES.get(name) or OTHERS.get(name, {})).get(str(given.value))
    return f"{place}: {refused or _reason(field, given.value, detail)}"


def _reason(field: FieldInfo, given: Any, detail: ErrorDetails) -> str:
    """Why a value is invalid for this setting."""
    kind = without_none(field.annotation)
    if given is None or str(given).lower() in ("none", "null"):
        default = default_of(field)
        return "needs a value" + (f": leave it out for its default, {default}" if default else "")
    if get_origin(kind) is dict and detail["type"] == "dict_type":
        return "should be names, or names and their numbers: '{\"name\": 1}'"
    parts = [part for part in get_args(kind) if get_origin(kind) is tuple]
    if parts and Ellipsis not in parts and isinstance(given, Sequence) and len(given) != len(parts):
        return f"takes {len(parts)} values, not {len(given)}"
    return detail["msg"].removeprefix("Value error, ").removeprefix("Input ").split(", unable to ")[0]


def _nest(values: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """`{"train.seed": 1}` -> `{"train": {"seed": 1}}`. All sections exist, so that errors name missing settings."""
    root: dict[str, Any] = {}
    for path in [*(f"{section}." for section in sections), *values]:
        node = root
        *parts, last = path.split(".")
        for part in parts:
            node = node.setdefault(part, {})
        if last:
            node[last] = values[path]
    return root
