from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agents.user_environments import ENVIRONMENTS


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
    assert not set(psutil.Process().children(recursive=True)) - before
