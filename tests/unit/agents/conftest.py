import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agents.scripted_policy import GAMES
from agents.user_environments import ENVIRONMENTS
from chat_templates import text_processor

from vlmrl.models.tiny import build
from vlmrl.plugins import Processor, processor
from vlmrl.system.fork_server import VARIABLE, fork_server


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run in asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `user_environments.ENVIRONMENTS`."""
    path = tmp_path_factory.mktemp("user") / "my_environment.py"
    path.write_text(ENVIRONMENTS)
    return path


@pytest.fixture
def no_leftover_processes() -> Iterator[None]:
    """Check that a test leaves no process."""
    before = set(psutil.Process().children(recursive=True))
    yield
    _, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=2)
    assert not left


@pytest.fixture(scope="session")
def python_that_has_imported() -> Iterator[str]:
    """A command that takes the place of Python, and has imported what processes of environments need."""
    with tempfile.TemporaryDirectory(prefix="vlmrl-") as folder, fork_server(Path(folder), ["vlmrl.agents.spawner"]):
        yield os.environ.pop(VARIABLE, sys.executable)


@pytest.fixture
def quick_processes(python_that_has_imported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments start in a tenth of the time."""
    monkeypatch.setattr(sys, "executable", python_that_has_imported)


@pytest.fixture(scope="session")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `scripted_policy.GAMES`."""
    path = tmp_path_factory.mktemp("user") / "games.py"
    path.write_text(GAMES)
    return path


@pytest.fixture(scope="session")
def chat() -> Processor:
    """A text model's processor."""
    return text_processor("chatml")


@pytest.fixture(scope="session")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    """A vision-language model's processor."""
    folder = build("qwen2_5_vl", tmp_path_factory.mktemp("models") / "vlm", size="micro")
    return processor(str(folder), min_pixels=784, max_pixels=150_000)
