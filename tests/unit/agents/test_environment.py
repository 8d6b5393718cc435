"""Tools: their schemas, and the arguments that fit them."""

import inspect
import subprocess
import sys
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from vlmrl.agents import Reply, tool
from vlmrl.agents.environment import ToolError, ToolSpec, call_tool, tools_of
from vlmrl.errors import ConfigError


class Point(BaseModel):
    x: int
    y: int


class Plain:
    def step(self, response: str) -> Reply:
        return Reply(response, done=True)


class Tools(Plain):
    @tool
    def second(self) -> str:
        """No arguments."""
        return "second"

    @tool
    def first(
        self,
        schema: Annotated[float, Field(description="In percent.", ge=0)],
        *,
        mode: Literal["a", "b"] = "a",
        title: list[int] | None = None,
    ) -> Any:
        """Two lines:

        of text.
        """
        return schema, mode, title

    @tool
    def at(self, point: Point) -> int:
        """A structure."""
        return point.x

    def hidden(self) -> None:
        """Not a tool."""


class More(Tools):
    @tool
    async def second(self) -> str:  # type: ignore[override]
        """Overridden."""
        return "more"


def test_the_schema_comes_from_the_signature() -> None:
    specs = tools_of(Tools())
    assert list(specs) == ["second", "first", "at"]
    assert specs["second"] == ToolSpec(
        "second", "No arguments.", {"type": "object", "properties": {}, "additionalProperties": False}
    )
    assert specs["first"].description == "Two lines:\n\nof text."
    assert specs["first"].parameters == {
        "type": "object",
        "properties": {
            "schema": {"type": "number", "minimum": 0, "description": "In percent."},
            "mode": {"type": "string", "enum": ["a", "b"], "default": "a"},
            "title": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}], "default": None},
        },
        "required": ["schema"],
        "additionalProperties": False,
    }


def test_arguments_are_converted_to_the_types_of_the_parameters() -> None:
    assert call_tool(Tools(), "first", {"schema": "2.5", "title": [1]}) == (2.5, "a", [1])
    assert call_tool(Tools(), "at", {"point": {"x": "3", "y": 4}}) == 3
    assert Tools().second() == "second", "a tool is still a method"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("first", {}, "schema: Field required"),
        ("first", {"schema": -1}, "schema: Input should be greater than or equal to 0"),
        ("first", {"schema": 1, "x": 1, "mode": "c"}, "mode: Input should be 'a' or 'b'; x: Extra inputs are not"),
        ("at", {"point": {"x": 1}}, "point.y: Field required"),
        ("hidden", {}, "there is no tool hidden"),
        ("step", {"response": ""}, "there is no tool step"),
        ("nothing", {}, "there is no tool nothing"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error_for_the_policy(name: str, arguments: Any, message: str) -> None:
    with pytest.raises(ToolError) as error:
        call_tool(Tools(), name, arguments)
    assert message in str(error.value)


def test_a_subclass_overrides_a_tool_and_it_may_be_async() -> None:
    assert tools_of(More())["second"].description == "Overridden."
    coroutine = call_tool(More(), "second", {})
    assert inspect.iscoroutine(coroutine)
    coroutine.close()


def untyped(self: Any, x) -> None:  # type: ignore[no-untyped-def]
    """Grow."""


def without_docstring(self: Any) -> None:
    pass


def variable(self: Any, *words: str) -> None:
    """Grow."""


def function(self: Any, x: object.__class__) -> None:  # type: ignore[name-defined]
    """Grow."""


def unknown(self: Any, x: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Grow."""


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (untyped, "tool grow: parameter x needs a type"),
        (without_docstring, "tool grow needs a docstring"),
        (variable, "parameter words cannot be passed by name"),
        (function, "a type of its parameters cannot be expressed in JSON"),
        (unknown, "its types cannot be read: name 'Nowhere' is not defined"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused(method: Any, message: str) -> None:
    method.__name__ = "grow"
    kind: Any = type("Grows", (Plain,), {"grow": tool(method)})
    with pytest.raises(ConfigError) as error:
        tools_of(kind())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_a_tool_has_no_name_of_a_method_that_vlmrl_calls(name: str) -> None:
    def method(self: Any) -> str:
        """Close the door."""
        return "closed"

    kind: Any = type("Doors", (Plain,), {name: tool(method)})
    with pytest.raises(ConfigError, match=f"tool {name}: vlmrl itself calls the method of this name"):
        tools_of(kind())


def test_static_and_class_methods_are_tools_with_the_mark_above_or_below() -> None:
    class Static(Plain):
        @tool
        @staticmethod
        def above(x: int) -> int:
            """Twice x."""
            return 2 * x

        @staticmethod
        @tool
        def below(x: int) -> int:
            """Three times x."""
            return 3 * x

        @tool
        @classmethod
        def of_class(cls, x: int) -> int:
            """Four times x."""
            return 4 * x

    assert [*tools_of(Static())] == ["above", "below", "of_class"]
    assert [call_tool(Static(), name, {"x": 1}) for name in tools_of(Static())] == [2, 3, 4]


def test_importing_the_classes_of_users_imports_nothing_heavy() -> None:
    code = (
        "import sys, vlmrl.agents; print(sorted({'torch', 'numpy', 'PIL', 'msgspec', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
