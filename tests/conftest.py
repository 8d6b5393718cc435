"""Set-up of all test sessions: an environment that imports the stack, no network, and a reason for each skip."""

import gc
import os
from pathlib import Path

import pytest

from vlmrl import startup

TESTS = Path(__file__).parent

# Before any test module imports torch, and for the processes that tests start.
startup.prepare()
os.environ |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "WANDB_MODE": "disabled"}


def _has_cuda() -> bool:
    if not Path("/dev/nvidiactl").exists():
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's folder says what it needs: tests/end_to_end the real stack, tests/gpu a CUDA device."""
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none here")
    has_cuda: bool | None = None
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder == "end_to_end":
            item.add_marker(pytest.mark.end_to_end)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))
        if folder == "gpu":
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu"):
            has_cuda = _has_cuda() if has_cuda is None else has_cuda
            if not has_cuda:
                item.add_marker(skip_gpu)


def pytest_collection_finish() -> None:
    """Leave what has been imported out of later garbage collections, each of which would take a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Take part in the interpreter's end, at which libraries count what is left of their objects."""
    gc.unfreeze()
