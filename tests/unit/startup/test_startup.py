"""The environment of processes and their children."""

import os
import subprocess
import sys

import pytest

from vlmrl import startup


def test_the_folder_comes_first_on_pythonpath_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/somewhere{os.pathsep}{startup.FOLDER}")
    for _ in range(2):
        path = startup.environment()["PYTHONPATH"]
        assert path.split(os.pathsep) == [startup.FOLDER, "/somewhere"]
        monkeypatch.setenv("PYTHONPATH", path)


def test_variables_that_the_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert startup.environment()["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_devices_are_decided_on_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without a GPU must not tell workers with one to compute on CPU."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(startup, "has_gpu", lambda: False)
    assert startup.environment()["DS_ACCELERATOR"] == "cpu"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # as `prepare` leaves it in the driver
    assert "DS_ACCELERATOR" not in startup.portable_environment()
    monkeypatch.setattr(startup, "has_gpu", lambda: True)
    assert "DS_ACCELERATOR" not in startup.environment()


def test_the_choice_of_vllms_model_runner_reaches_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in startup.portable_environment()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert startup.portable_environment()["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_every_python_process_can_import_torchvision() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", "import torchvision.transforms.v2.functional as f; print(f.resize.__name__)"],
        env=os.environ | startup.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "resize"), done.stderr
