import multiprocessing
import multiprocessing.forkserver
from collections.abc import Iterator
from pathlib import Path

import pytest
from rewards.user_functions import FUNCTIONS


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run in asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `user_functions.FUNCTIONS`."""
    path = tmp_path_factory.mktemp("user") / "my_reward.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def no_leftover_processes() -> Iterator[None]:
    """Check that a test leaves no scoring process and no fork server."""
    yield
    assert not multiprocessing.active_children()
    assert multiprocessing.forkserver._forkserver._forkserver_pid is None  # type: ignore[attr-defined]
