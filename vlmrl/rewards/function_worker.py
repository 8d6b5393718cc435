"""The code of a scoring process: load the reward functions once, and call one of them for one response at a time.

The outcome of a call is a `RewardResult` of plain values: a user's exceptions and objects are never sent to the
training process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from vlmrl.config.built_in import REWARD_FUNCTIONS
from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.rewards import batch
from vlmrl.rewards.bounds import problem_of_reward
from vlmrl.rewards.failures import TooHardError, failure_of
from vlmrl.rewards.image_files import open_image
from vlmrl.rewards.messages import with_images
from vlmrl.system import stops
from vlmrl.system.environment_variables import hide_secrets
from vlmrl.system.lifeline import die_with, end_group_with
from vlmrl.system.output import print_to
from vlmrl.system.user_function import load_function, parameters_of, reason
from vlmrl.types import Failure, Retry

ARGUMENTS = ("prompt", "response", "messages", "label", "images", "metadata")
_DECLARED_ONLY = frozenset({"messages", "images"})
"""Large arguments, which `**kwargs` does not get."""
SETTING = "reward.remote_url"

SAFE_PATH = "vlmrl"
"""PYTHONSAFEPATH of the fork server, not of programs that a function starts."""
_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class Declared:
    """The signature of a reward function loaded in another process."""

    arguments: frozenset[str]
    """The `ARGUMENTS` that it takes."""
    needs_label: bool
    """It cannot score a prompt without a label."""
    batch: batch.Signature | None = None
    """Its arguments if it takes a batch of responses; None: it takes one response."""

    def reads_messages(self, *, is_chat: bool) -> bool:
        """Whether it reads a response as messages; one that takes a batch does where `is_chat`."""
        return "messages" in self.arguments if self.batch is None else is_chat and self.batch.style == "trl"


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one response by one source, or why there is none."""

    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """The other numbers of a function that returns a dict."""
    problem: str | None = None
    """Why there is no value, in one line; then `value` is 0."""
    blame: Failure = "response"
    """The cause of the problem, if there is one."""
    retried: Retry | None = None
    """Why the call was made twice, if it was."""
    never_returned: bool = False
    """This call ran too long or ended its process, and so did all calls of its function before."""

    @property
    def failure(self) -> Failure | None:
        """Why there is no value; None: there is one."""
        return None if self.problem is None else self.blame


@dataclass(frozen=True, slots=True)
class _Loaded:
    function: Callable[..., Any]
    file: str
    declared: Declared


_loaded: dict[str, _Loaded | VlmrlError] = {}


def start(
    names: tuple[str, ...], spec: str | None, owner: int, pass_env: tuple[str, ...] = (), log: Path | None = None
) -> None:
    """Initialize a scoring process of the process `owner`. Functions see the secrets of the environment that `pass_env`
    names, and print to `log`."""
    # A killed run leaves none behind, nor what a function has started. The fork server alone does not see to that: it
    # waits until every process has ended that it or a function has forked.
    die_with(os.getppid())
    end_group_with(owner)
    stops.accept_sigterm()  # its pool ends one that takes too long by SIGTERM
    hide_secrets(os.environ, keep=pass_env)
    if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH:
        del os.environ["PYTHONSAFEPATH"]
    if log is not None:
        print_to(log)
    load(names, spec)


def load(names: tuple[str, ...], spec: str | None) -> None:
    """Load the built-in functions `names` and the user's function `spec`. Mistakes are kept for `describe` to raise."""
    for name in names:
        module = import_module(f"vlmrl.rewards.{name}")
        arguments = frozenset(inspect.signature(module.score).parameters)
        declared = Declared(arguments, REWARD_FUNCTIONS[name].needs_label)
        _loaded[name] = _Loaded(module.score, str(module.__file__), declared)
    if spec is not None:
        name = spec.rpartition(":")[2]
        try:
            function = load_function(spec, SETTING)
            declared = declare(function, spec)
            _loaded[name] = _Loaded(function, str(Path(spec.rpartition(":")[0]).expanduser().resolve()), declared)
        except VlmrlError as error:
            _loaded[name] = error


def describe(name: str) -> Declared:
    """Return the signature of a loaded function. Raises ConfigError if it could not be loaded."""
    loaded = _loaded[name]
    if isinstance(loaded, VlmrlError):
        raise loaded
    return loaded.declared


def call(name: str, arguments: Mapping[str, Any], images: tuple[str, ...]) -> RewardResult:
    """Score one response. `images` are .npy files: each call gets new PIL images, which it may change.

    Raises TooHardError as the function does: a second try may succeed.
    """
    loaded = _loaded[name]
    if isinstance(loaded, VlmrlError):
        return RewardResult(problem=str(loaded), blame="infrastructure")
    try:
        given = dict(arguments)
        if "images" in loaded.declared.arguments:
            given["images"] = [open_image(file) for file in images]
            given |= _opened(arguments)
        returned = loaded.function(**given)
        return to_result(returned)
    except TooHardError:
        raise
    except BaseException as error:  # the user's code may raise anything, sys.exit included
        return RewardResult(problem=reason(error, file=loaded.file), blame=failure_of(error))


def call_all(
    name: str, arguments: Sequence[Mapping[str, Any]], images: Sequence[tuple[str, ...]]
) -> tuple[RewardResult, ...]:
    """Score some responses, all at once if the function takes a batch; `arguments` and `images` have one item for each.

    A batch that raises is scored one by one, so that only responses that cannot be scored fail.
    """
    loaded = _loaded[name]
    if isinstance(loaded, VlmrlError) or loaded.declared.batch is None:
        return tuple(call(name, given, files) for given, files in zip(arguments, images, strict=True))
    signature = loaded.declared.batch
    try:
        pictures = [[open_image(file) for file in files] for files in images]
        items = [{**item, **_opened(item)} for item in arguments]
        returned = loaded.function(**batch.arguments(signature, items, pictures))
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
    except TooHardError:
        raise
    except BaseException as error:  # the user's code may raise anything, sys.exit included
        result = RewardResult(problem=reason(error, file=loaded.file), blame=failure_of(error))
    else:
        return _results(returned, len(arguments), signature)
    if len(arguments) == 1 or result.blame == "infrastructure":
        return (result,) * len(arguments)
    singles = [call_all(name, [given], [files]) for given, files in zip(arguments, images, strict=True)]
    return tuple(result for (result,) in singles)


def _results(returned: Any, count: int, signature: batch.Signature) -> tuple[RewardResult, ...]:
    """Return the results of `count` responses from what a batch returned. If that is malformed, all fail; they are not
    scored one by one, because a malformed list of one value could pass as a reward."""
    try:
        return tuple(to_result(value) for value in batch.split_by_response(returned, count, style=signature.style))
    except Exception as error:
        return (RewardResult(problem=f"{type(error).__name__}: {one_line(error)}"),) * count


def unusable(name: str, label: str) -> str | None:
    """Why no response can match the label by the built-in function `name`; None when one can."""
    problem: str | None = import_module(f"vlmrl.rewards.{name}").unusable(label)
    return problem


def declare(function: Callable[..., Any], spec: str) -> Declared:
    """Read the arguments of a user's function; `**kwargs` takes all but the images and the messages.

    Raises ConfigError if it requires unknown arguments, or does not take the response.
    """
    parameters = parameters_of(function, flag=SETTING, name=spec)
    signature = batch.signature_of(parameters, spec, setting=SETTING)
    large, others = parameters.names & _DECLARED_ONLY, frozenset(ARGUMENTS) - _DECLARED_ONLY
    if signature is not None:
        return Declared(others | (large & {"images"}), needs_label=False, batch=signature)
    names = parameters.taken(others) | large
    unmet = parameters.unmet(ARGUMENTS)
    if unmet or not names & {"response", "messages"}:
        problem = f"requires {', '.join(unmet)}" if unmet else "does not take response"
        raise ConfigError(
            f"{SETTING}: {spec} {problem}; a reward takes response or messages and, by name, any of: "
            f"{', '.join(ARGUMENTS)}; or a batch as in TRL (completions) or OpenRLHF (queries, prompts, labels)"
        )
    return Declared(names, needs_label=False)


def to_result(returned: Any) -> RewardResult:
    """Convert what a function or server returned for one response: a number, or a dict of numbers with one named
    `total`."""
    if not isinstance(returned, Mapping):
        return _finite({"it": returned}, "it")
    if "total" not in returned:
        return RewardResult(
            problem=f"it returned a dict without 'total' (keys: {one_line(sorted(map(str, returned)))})"
        )
    return _finite(returned, "total")


def _finite(values: Mapping[Any, Any], total: str) -> RewardResult:
    plain = {}
    for key, value in values.items():
        subject = "it returned" if key == "it" else f"it returned {key!r} ="
        converted = _number(value)
        if converted is None:
            return RewardResult(problem=f"{subject} {_describe(value)} where one number per response is expected")
        if not math.isfinite(converted):
            return RewardResult(problem=f"{subject} {converted}, which is not a finite number")
        if key == total and (problem := problem_of_reward(converted)):
            return RewardResult(problem=f"{subject} {converted:g}, {problem}")
        plain[key] = converted
    # Part names become metric names.
    parts = {re.sub(r"[^A-Za-z0-9_.-]", "_", str(k)) or "_": v for k, v in plain.items() if k != total}
    return RewardResult(value=plain[total], parts=parts)


def _number(value: Any) -> float | None:
    """Python, NumPy and zero-dimensional tensor numbers; a list of one number is not a number."""
    is_scalar_array = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    if is_scalar_array:
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        return "a coroutine (write def, not async def)"
    try:
        return f"a {type(value).__name__} of {len(value)}"
    except TypeError:
        return f"a {type(value).__name__}"


def one_line(value: object) -> str:
    """Text from outside as one printable line, cut to a length that fits a message."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return line if len(line) <= _MAX_REASON_CHARS else line[:_MAX_REASON_CHARS] + "..."


def _opened(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages among the arguments with their images; {} if there are none."""
    messages = arguments.get("messages")
    return {} if messages is None else {"messages": with_images(messages, open_image)}
