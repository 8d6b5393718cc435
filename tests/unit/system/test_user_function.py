from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import ConfigError
from vlmrl.system.user_function import Parameters, declared, load_function, name_or_function, parameters_of, reason

OFFERED = ("rewards", "sampled", "values")


def test_a_users_function_is_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    assert load_function(f"{tmp_path}/mine.py:double", "reward.remote_url")(21) == 42


def test_a_file_without_the_first_of_two_names_may_have_the_second(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def run():\n    return 1\n")
    load = lambda name: load_function(f"{tmp_path}/mine.py:{name}", "flag", default=("make", "run"))  # noqa: E731
    assert load("make")() == load("run")() == 1
    with pytest.raises(ConfigError, match="has no function other; it has: run"):
        load("other")
    (tmp_path / "mine.py").write_text("def run(): ...\ndef make():\n    return 2\n")
    assert load("make")() == 2


def test_a_setting_is_a_name_or_a_users_function_that_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("COUNT = []\ndef count():\n    COUNT.append(1)\n    return len(COUNT)\n")
    assert name_or_function("rloo", "algo.advantage.estimator") == "rloo"
    for expected in (1, 2):
        function = name_or_function(f"{tmp_path}/mine.py:count", "algo.advantage.estimator")
        assert callable(function)
        assert function() == expected


def test_a_corrected_file_is_loaded_again(tmp_path: Path) -> None:
    spec = f"{tmp_path}/mine.py:f"
    with pytest.raises(ConfigError, match=r"^algo.advantage.estimator: there is no file"):
        name_or_function(spec, "algo.advantage.estimator")
    (tmp_path / "mine.py").write_text("def f(rewards):\n    return rewards\n")
    assert callable(name_or_function(spec, "algo.advantage.estimator"))


@pytest.mark.parametrize(
    ("content", "spec", "message"),
    [
        ("", "mine.py", "should look like path/to/file.py:function"),
        ("", "mine.txt:f", "should look like"),
        ("", "other.py:f", "there is no file .*other.py"),
        ("def g(): ...\ndef _h(): ...\nF = 3\n", "mine.py:f", "has no function f; it has: g$"),
        ("f = 3\n", "mine.py:f", "has no function f; it has: none"),
        (
            "import no_such_module\n",
            "mine.py:f",
            "does not import: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("def f(:\n", "mine.py:f", "does not import: SyntaxError"),
        ("raise SystemExit(3)\n", "mine.py:f", "does not import: SystemExit"),
    ],
)
def test_a_users_file_that_cannot_be_used_is_one_line(content: str, spec: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=f"^reward.remote_url: .*{message}") as caught:
        load_function(f"{tmp_path}/{spec}", "reward.remote_url")
    assert "\n" not in str(caught.value)


def takes_no_names(rewards: Any, /) -> Any:
    return rewards


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (
            lambda rewards, answers: rewards,
            r"requires answers, which vlmrl does not pass; it may declare: rewards, sampled, values",
        ),
        (takes_no_names, "requires rewards, which vlmrl does not pass"),
        (dict.fromkeys, "requires iterable"),
    ],
)
def test_a_function_with_unknown_parameters_is_refused(mine: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^a.b: .*{message}"):
        declared(mine, OFFERED, flag="a.b")


def test_parameters_are_optional_required_or_positional_only() -> None:
    def mine(first: int, second: int = 2, /, third: int = 3, *rest: int, fourth: int, **others: int) -> None: ...

    parameters = parameters_of(mine, flag="a.b")
    assert parameters == Parameters(frozenset({"third", "fourth"}), ("fourth",), ("first",), takes_all=True)
    assert parameters.taken(("third", "fifth")) == {"third", "fifth"}
    assert parameters.unmet(("third",)) == ["first", "fourth"]


def test_a_signature_that_cannot_be_read_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^a\.b: the signature of mine.py:f cannot be read: "):
        parameters_of(3, flag="a.b", name="mine.py:f")  # type: ignore[arg-type]


def test_the_reason_of_a_failure_names_the_last_line_of_the_users_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json\n\ndef f(text):\n    return json.loads(text)\n")
    function = load_function(f"{tmp_path}/mine.py:f", "a.b")
    with pytest.raises(ValueError, match="Expecting") as caught:
        function("{")
    assert reason(caught.value, file=f"{tmp_path}/mine.py").endswith("mine.py:4)")
    assert "json/decoder.py:" in reason(caught.value)
    with pytest.raises(TypeError) as missed:
        function()
    # The arguments of the call are not a line of the user's file.
    assert reason(missed.value, file=f"{tmp_path}/mine.py").endswith("missing 1 required positional argument: 'text'")
