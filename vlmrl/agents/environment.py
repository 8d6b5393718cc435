"""The classes that users write: what an environment has, returns, and offers as tools.

    from vlmrl.agents import Reply, tool

    class Guess:                                  # one object per episode
        def reset(self, row, seed):               # optional; declare either, both or none
            self.number = random.Random(seed).randint(1, 9)
            return "Guess my number."             # text, an image, or a list of both; None: the row's own prompt
        def step(self, response):                 # the policy's response
            right = response.strip() == str(self.number)
            return Reply("Right." if right else "Wrong, again.", reward=float(right), done=right)
        @tool
        def hint(self, modulus: int) -> int:
            "The remainder of the number."        # name, types and docstring become the tool's schema
            return self.number % modulus
        def close(self):                          # optional
            ...

    def make():                                   # called once per episode
        return Guess()

`row` has the keys question, label, metadata and, if the row has images, images (PIL); with the dataset `episodes` it is
None. Images are PIL images or uint8 arrays, [height, width, 3]. A tool returns text, an image, a list of both, any
other JSON value, or a `Reply`. Any method may be `async def`; what needs a running event loop begins in `reset`.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from vlmrl.errors import ConfigError

_MARK = "_is_tool_of_environment"
_METHODS = ("reset", "step", "close")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Reply:
    """The environment's reaction to a response of the policy."""

    content: Any = None
    """Text, an image, or a list of both, in order; None only if `done`."""
    reward: float = 0.0
    """The reward of that response."""
    done: bool = False
    """The episode ends here."""


@dataclass(frozen=True, slots=True)
class Task:
    """An episode for an agent, `async def run(task)`: the policy is behind an OpenAI-compatible server."""

    base_url: str
    """For `openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)` and clients like it."""
    api_key: str = field(repr=False)
    """The episode's own. It is revoked when `run` ends."""
    row: dict[str, Any] | None
    """question, label, metadata and, if the row has images, images (PIL); None for the dataset `episodes`."""
    seed: int
    """Equal for all episodes of a group."""
    model: str = "policy"
    """The name of the model; any other does as well."""


class Environment(Protocol):
    """An episode. `reset(row, seed)` and `close()` are optional, and so are tools."""

    def step(self, response: str) -> Any:
        """Return a `Reply`."""


def tool(function: _Function) -> _Function:
    """Offer a method of an environment to the policy as a tool."""
    setattr(getattr(function, "__func__", function), _MARK, True)  # below it may be @staticmethod or @classmethod
    return function


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as chat templates present it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""


class ToolError(Exception):
    """A call of a tool that failed: `str` is one line for the policy."""


def tools_of(environment: Environment) -> dict[str, ToolSpec]:
    """Describe the tools of an environment, in the order of their definition.

    Raises:
        ConfigError: a tool has no docstring, the name of a method that vlmrl calls, or a parameter without a type or
            with one that JSON cannot express.
    """
    names = dict.fromkeys(name for kind in reversed(type(environment).__mro__) for name in vars(kind))
    specs = {}
    for name in names:
        if not getattr(getattr(type(environment), name, None), _MARK, False):
            continue
        if name in _METHODS:
            raise ConfigError(f"tool {name}: vlmrl itself calls the method of this name; choose another")
        method = getattr(environment, name)
        description = inspect.getdoc(method)
        if not description:
            raise ConfigError(f"tool {name} needs a docstring: the policy reads it")
        specs[name] = ToolSpec(name, description, _arguments(method).schema)
    return specs


def call_tool(environment: Environment, name: str, arguments: Mapping[str, Any]) -> Any:
    """Check the arguments and call a tool; return what it returns, for an async tool a coroutine.

    Raises:
        ToolError: the environment has no such tool, or the arguments do not fit its schema.
    """
    method: Any = getattr(environment, name, None)
    if not getattr(method, _MARK, False):
        raise ToolError(f"there is no tool {name}")
    return method(**_arguments(method).validated(arguments))


class _Arguments:
    """The parameters of a tool as a pydantic model."""

    def __init__(self, function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
        from pydantic import ConfigDict, Field, PydanticUserError, create_model
        from pydantic.errors import PydanticInvalidForJsonSchema

        name = function.__name__
        try:
            types = typing.get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ConfigError(f"tool {name}: its types cannot be read: {error}") from error
        fields: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        """Field of the model -> parameter, whose name might be that of a method of pydantic's."""
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f"tool {name}: parameter {parameter.name} cannot be passed by name")
            if parameter.name not in types:
                raise ConfigError(f"tool {name}: parameter {parameter.name} needs a type")
            field = f"argument_{len(fields)}"
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[field] = (types[parameter.name], Field(default, alias=parameter.name))
            self._names[field] = parameter.name
        try:
            self._model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            self.schema: dict[str, Any] = self._model.model_json_schema(schema_generator=_without_titles())
        except (PydanticUserError, PydanticInvalidForJsonSchema) as error:
            first = str(error).partition("\n")[0]
            raise ConfigError(f"tool {name}: a type of its parameters cannot be expressed in JSON: {first}") from error
        self.schema.pop("title", None)

    def validated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments to the types of the parameters. Raises ToolError."""
        from pydantic import ValidationError

        try:
            model = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            problems = (".".join(map(str, e["loc"])) + ": " + e["msg"] for e in error.errors(include_url=False))
            raise ToolError("; ".join(problems)) from error
        return {parameter: getattr(model, field) for field, parameter in self._names.items()}


@functools.cache
def _without_titles() -> type[Any]:
    from pydantic.json_schema import GenerateJsonSchema

    class WithoutTitles(GenerateJsonSchema):
        """Schemas without titles, which repeat the names in the prompt."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    return WithoutTitles


def _arguments(method: Callable[..., Any]) -> _Arguments:
    return _arguments_of_function(getattr(method, "__func__", method), int(inspect.ismethod(method)))


@functools.lru_cache(maxsize=256)
def _arguments_of_function(function: Callable[..., Any], num_bound: int) -> _Arguments:
    return _Arguments(function, list(inspect.signature(function).parameters.values())[num_bound:])
