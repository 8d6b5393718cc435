import io
import pickle

import pytest
from rich.console import Console

from vlmrl.errors import ConfigError, DataError
from vlmrl.system.plain_text import one_line, print_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain é 汉字 \\n", "plain é 汉字 \\n"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[2J\x07\x9b", "\\x1b[2J\\x07\\x9b"),
        ("\u202egnp.exe\u2028", "\\u202egnp.exe\\u2028"),
        ("\ud800", "\\ud800"),
        (b"x\n", "b'x\\n'"),
        ("", ""),
    ],
)
def test_text_becomes_one_plain_line(text: object, line: str) -> None:
    assert one_line(text) == line
    assert one_line(line) == line
    assert line.isprintable()


def test_a_long_text_is_cut() -> None:
    assert one_line("x" * 10_000_000, max_chars=5) == "xxxxx..."


def test_errors_are_plain_text_and_can_be_pickled() -> None:
    error = DataError("row a\n\x1b[31m")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == "row a\\n\\x1b[31m"


def test_setting_errors_are_a_line_each() -> None:
    assert str(ConfigError("2 mistakes\n  a\x07\n  b")) == "2 mistakes\n  a\\x07\n  b"


def test_a_line_is_printed_verbatim() -> None:
    text = "row img[/x].png [bold]b[/bold] :warning: 17 " + "y" * 200
    for terminal in (False, True):
        out = io.StringIO()
        print_line(Console(file=out, width=40, force_terminal=terminal), text + "\n\x1b]0;title\x07")
        assert out.getvalue() == text + "\\n\\x1b]0;title\\x07\n"
