"""From YAML files and flags to settings: every mistake in one go, with where it came from and what to write instead.

The command line is parsed here and not by tyro: tyro stops at the first kind of mistake, does not know where a value of
a YAML file came from, and takes no explicit value for a switch, as `--train.colocate_all false`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vlmrl.config.aliases import alias_of, answer
from vlmrl.config.base import ConflictError
from vlmrl.config.help import default_of
from vlmrl.config.names import named_in, nearest
from vlmrl.config.openrlhf import REFUSED, REFUSED_VALUES
from vlmrl.config.run import VERBS
from vlmrl.config.sources import Given, Unknown, Written, read, without_none
from vlmrl.config.verb import Run
from vlmrl.errors import ConfigError

Config = TypeVar("Config", bound=Run)


def load(kind: type[Config], argv: Sequence[str]) -> Config:
    """The settings of a verb, from the words that follow it on the command line.

    `--config FILE.yaml` may be given several times; a later file overrides an earlier one and flags override files,
    setting by setting.

    Raises:
        ConfigError: one line for each mistake there is.
    """
    known = kind.settings()
    written = read(argv, known, kind.sections())
    meant = [_explain(unknown, kind, written) for unknown in written.unknown]
    config = _Validator(kind, known, written, doubtful={*written.spoilt, *filter(None, meant)}).config()
    if written.mistakes:
        raise ConfigError(_report(written.mistakes))
    assert config is not None, "nothing could be made of the settings, and no mistake was found in them"
    return config


def _report(mistakes: Sequence[str]) -> str:
    if len(mistakes) == 1:
        return mistakes[0]
    return "\n  ".join([f"{len(mistakes)} mistakes in the settings", *mistakes])


def _explain(unknown: Unknown, kind: type[Run], written: Written) -> str | None:
    """Say what is wrong with an unknown name; returns the setting that was meant, when there is one."""
    dashes = "--" if unknown.origin.startswith("--") else ""
    here = unknown.origin if dashes else f"{unknown.origin}: {unknown.name}"
    refused = REFUSED.get(unknown.name)
    if refused is not None:
        written.mistakes.append(f"{here}: {refused}")
        return None
    what, names = "setting", list(kind.settings())
    if unknown.is_section or unknown.name in kind.sections():
        what, names = "section", kind.sections()
    if unknown.name in names:
        written.mistakes.append(f"{here}: is a section: give its settings, {dashes}{unknown.name}.NAME value")
        return None
    found = nearest(unknown.name, names)
    elsewhere = [other.verb for other in VERBS if unknown.name in (*other.settings(), *other.sections())]
    alias = alias_of(unknown.name, kind.settings())
    if elsewhere:
        written.mistakes.append(f"{here}: vlmrl {kind.verb} does not have it; vlmrl {elsewhere[0]} does")
    elif alias is not None:
        has = {other.verb: other.settings().keys() for other in VERBS}
        said, found = answer(alias, verb=kind.verb, dashes=dashes, has=has)
        written.mistakes.append(f"{here}: {said}")
    elif found is not None:
        written.mistakes.append(f"{here}: no such {what}; did you mean {dashes}{found}?")
    else:
        written.mistakes.append(f"{here}: no such {what}, and none like it; `vlmrl {kind.verb} --help` lists them")
    return found


class _Validator:
    """Validates the settings, repeatedly, each time without those already known to be wrong.

    pydantic does not run the checks that cross settings while one of these is wrong by itself. So a wrong setting is
    reported, taken out, and the rest is validated again; a check that speaks of a setting which is already in doubt is
    not repeated to the user.
    """

    def __init__(
        self, kind: type[Run], known: Mapping[str, FieldInfo], written: Written, *, doubtful: set[str]
    ) -> None:
        self._kind, self._known, self._written, self._doubtful = kind, known, written, doubtful
        self._values = {name: given.value for name, given in written.given.items()}

    def config(self) -> Any:
        """The settings, or what is left of them; None when nothing could be made."""
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
        elif name in self._values:  # one complaint about a value is enough
            self._written.mistakes.append(_wrong_value(name, self._known[name], self._written.given[name], detail))
            self._doubtful.add(name)
            del self._values[name]

    def _reject_missing(self, name: str) -> None:
        if name not in self._doubtful:
            about = " ".join((self._known[name].description or "").split())
            self._written.mistakes.append(f"--{name} is missing: {about}")
        self._doubtful.add(name)
        self._values[name] = "?"  # every required setting is text: it stands in, so that the rest can be validated

    def _reject_conflict(self, detail: ErrorDetails) -> None:
        error = detail.get("ctx", {}).get("error")
        for line in error.lines if isinstance(error, ConflictError) else [detail["msg"]]:
            names = named_in(line, self._known)
            if not self._doubtful.intersection(names):
                origins = [self._written.given[name].origin for name in names if name in self._written.given]
                self._written.mistakes.append(line + (f" ({', '.join(dict.fromkeys(origins))})" if origins else ""))
            # A check inside a section keeps those that cross sections from being made: without its settings, they are.
            if detail["loc"]:
                self._doubtful.update(names)
                for name in names:
                    self._values.pop(name, None)

    def _setting(self, loc: tuple[int | str, ...]) -> str | None:
        """The setting that an error is about; None when it is about a section or about several of them."""
        names = (".".join(map(str, loc[:length])) for length in range(1, len(loc) + 1))
        return next((name for name in names if name in self._known), None)


def _wrong_value(name: str, field: FieldInfo, given: Given, detail: ErrorDetails) -> str:
    what = (
        f"{given.origin} {given.shown}" if given.origin.startswith("--") else f"{given.origin}: {name}: {given.shown}"
    )
    refused = REFUSED_VALUES.get(name, {}).get(str(given.value))
    return f"{what}: {refused or _reason(field, given.value, detail)}"


def _reason(field: FieldInfo, given: Any, detail: ErrorDetails) -> str:
    """Why a value is none for this setting."""
    kind = without_none(field.annotation)
    if given is None or str(given).lower() in ("none", "null"):
        default = default_of(field)
        return "wants a value" + (f": leave it out for its default, {default}" if default else "")
    if get_origin(kind) is dict and detail["type"] == "dict_type":
        return "should be names, or names and their numbers: '{\"name\": 1}'"
    wanted = [part for part in get_args(kind) if get_origin(kind) is tuple]
    if wanted and Ellipsis not in wanted and isinstance(given, Sequence) and len(given) != len(wanted):
        return f"wants {len(wanted)} values, not {len(given)}"
    return detail["msg"].removeprefix("Value error, ").removeprefix("Input ").split(", unable to ")[0]


def _nest(values: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """`{"train.seed": 1}` -> `{"train": {"seed": 1}}`. Every section is there: what is missing is then a setting."""
    root: dict[str, Any] = {}
    for path in [*(f"{section}." for section in sections), *values]:
        node = root
        *parts, last = path.split(".")
        for part in parts:
            node = node.setdefault(part, {})
        if last:
            node[last] = values[path]
    return root
