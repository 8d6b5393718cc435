import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlmrl.errors import ConfigError
from vlmrl.rewards import function_worker
from vlmrl.rewards.function_worker import Declared, RewardResult


def loaded(tmp_path: Path, body: str) -> Callable[..., RewardResult]:
    (tmp_path / "reward.py").write_text(body)
    function_worker.load((), f"{tmp_path / 'reward.py'}:f")
    function_worker.describe("f")
    return lambda response="x", images=(), **known: function_worker.call("f", {"response": response} | known, images)


def test_a_built_in_function_declares_what_it_needs() -> None:
    function_worker.load(("exact", "format", "math"), None)
    assert function_worker.describe("exact") == Declared(frozenset({"response", "label"}), needs_label=True)
    assert function_worker.describe("math") == Declared(frozenset({"response", "label"}), needs_label=True)
    assert function_worker.describe("format") == Declared(frozenset({"prompt", "response"}), needs_label=False)
    assert function_worker.call("exact", {"response": "4", "label": "4"}, ()) == RewardResult(1.0)


@pytest.mark.parametrize(
    ("signature", "arguments"),
    [
        ("response", {"response"}),
        ("prompt, response, label=None, *, images, metadata", {"prompt", "response", "label", "images", "metadata"}),
        ("response, temperature=1.0", {"response"}),
        ("**known", {"prompt", "response", "label", "metadata"}),
        ("images, **known", {"prompt", "response", "label", "metadata", "images"}),
    ],
)
def test_a_function_receives_the_arguments_that_it_declares(signature: str, arguments: set[str]) -> None:
    function = eval(f"lambda {signature}: 0.0")  # noqa: S307
    assert function_worker.declare(function, "r.py:f").arguments == arguments


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("", "does not take response"),
        ("prompt, label", "does not take response"),
        ("*everything", "does not take response"),
        ("response, gold", "requires gold"),
        ("response, /", "requires response"),
    ],
)
def test_a_function_that_requires_other_arguments_is_refused(signature: str, message: str) -> None:
    function = eval(f"lambda {signature}: 0.0")  # noqa: S307
    with pytest.raises(ConfigError) as error:
        function_worker.declare(function, "r.py:f")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3", RewardResult(3.0)),
        ("True", RewardResult(1.0)),
        ("np.int64(2)", RewardResult(2.0)),
        ("np.array(0.5)", RewardResult(0.5)),
        ("torch.tensor(0.5)", RewardResult(0.5)),
        ("fractions.Fraction(1, 4)", RewardResult(0.25)),
        ("{'total': 1, 'is it?': np.float32(0.5)}", RewardResult(1.0, {"is_it_": 0.5})),
        (
            "torch.ones(2)",
            RewardResult(problem="it returned a Tensor of 2 where one number per response is expected"),
        ),
        (
            "[1.0]",
            RewardResult(problem="it returned a list of 1 where one number per response is expected"),
        ),
        ("1j", RewardResult(problem="it returned a complex where one number per response is expected")),
        ("-np.inf", RewardResult(problem="it returned -inf, which is not a finite number")),
        ("-2e9", RewardResult(problem="it returned -2e+09, and a reward is at most 1,000,000,000")),
        ("{'total': 1, 'bytes_read': 2e9}", RewardResult(1.0, {"bytes_read": 2e9})),
    ],
)
def test_a_result_is_one_number_or_a_problem(tmp_path: Path, expression: str, result: RewardResult) -> None:
    call = loaded(tmp_path, f"import fractions, torch, numpy as np\ndef f(response): return {expression}")
    assert call() == result


def test_the_reason_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    call = loaded(tmp_path, "import json\n\ndef f(response):\n    return json.loads(response)['score']\n")
    message = call("{").problem
    assert message is not None
    assert message.startswith("JSONDecodeError: Expecting property name")
    assert message.endswith("reward.py:4)")


@pytest.mark.parametrize(
    ("raised", "start"),
    [
        ("KeyboardInterrupt", "KeyboardInterrupt ("),
        ("SystemExit(3)", "SystemExit: 3 ("),
        ("RecursionError('deep')", "RecursionError: deep ("),
        ("ValueError('a\\n  b' * 500)", "ValueError: a ba ba b"),
        ("Rude()", "Rude: ? ("),
    ],
)
def test_any_error_becomes_one_short_line(tmp_path: Path, raised: str, start: str) -> None:
    rude = "class Rude(Exception):\n    def __str__(self): raise RuntimeError\n"
    message = loaded(tmp_path, f"{rude}def f(response): raise {raised}")().problem
    assert message is not None
    assert message.startswith(start)
    assert "\n" not in message
    assert len(message) < 600


def test_images_are_pil_and_fresh_for_every_call(tmp_path: Path) -> None:
    np.save(tmp_path / "red.npy", np.full((2, 3, 3), (255, 0, 0), np.uint8))
    body = "def f(response, images):\n    images[0].putpixel((0, 0), (0, 0, images[0].getpixel((0, 0))[0]))\n"
    call = loaded(tmp_path, body + "    return images[0].getpixel((0, 0))[2] + images[0].size[0]")
    files: Any = (str(tmp_path / "red.npy"),)
    assert [call(images=files).value for _ in range(2)] == [258.0, 258.0]


PRINTS = """
import sys
from pathlib import Path
from vlmrl.rewards import function_worker
from vlmrl.system.output import print_to
print_to(Path("/dev/full"))
function_worker.load((), sys.argv[1] + ":reward")
sys.exit(round(function_worker.call("reward", {"response": "7"}, ()).value))
"""


def test_printing_to_a_full_disk_costs_no_score(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import sys\ndef reward(response):\n"
        "    print(response)\n    print('x' * 100_000, file=sys.stderr)\n    return 7\n"
    )
    assert subprocess.run([sys.executable, "-c", PRINTS, str(file)], check=False).returncode == 7


_IN_A_POOL = """
import asyncio
from vlmrl.rewards.functions import Functions

async def main():
    functions = Functions(("exact",), None, num_workers=1, time_limit_s=5.0)
    await functions.start()
    print(*functions.names)
    await functions.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_functions_start_where_the_temporary_folder_is_too_long_for_a_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    script = tmp_path / "start.py"
    script.write_text(_IN_A_POOL)
    environment = os.environ | {"TMPDIR": str(long)}
    message = subprocess.check_output([sys.executable, script], env=environment, text=True, timeout=120)
    assert message == "exact\n"
    assert not list(long.iterdir())
