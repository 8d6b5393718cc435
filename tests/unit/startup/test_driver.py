"""Faults of the NVIDIA driver, with the driver that is required."""

from pathlib import Path

import pytest

from vlmrl.startup import driver

# As the kernel writes it, with the closed module and with the open one.
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Fri Mar  1 02:41:10 UTC 2024\nGCC version: 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)  Sun Jul\n"


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "535.161.08"), (OPEN, "580.65.06"), ("", None)])
def test_the_drivers_version_is_read_from_the_kernel(text: str, version: str | None, tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(text)
    assert driver.installed_driver(file) == version
    assert driver.installed_driver(tmp_path / "nowhere") is None


def test_an_old_driver_is_reported_with_the_one_that_is_required() -> None:
    wrong, fix = driver.gpu_fault_and_fix("13.0", "535.161.08")
    assert (
        wrong == "the NVIDIA driver 535.161.08 is too old for torch built for CUDA 13.0, which needs 580.65.06 or newer"
    )
    assert fix == "install NVIDIA driver 580.65.06 or newer on the host (a container uses the host's)"
    assert "525" in driver.gpu_fault_and_fix("12.8", "515.43")[1]


def test_a_new_enough_driver_is_not_the_fault() -> None:
    assert "sees no device" in driver.gpu_fault_and_fix("12.8", "535.161.08")[0]
    assert "sees no device" in driver.gpu_fault_and_fix("13.0", "580.65.06")[0]
    assert "sees no device" in driver.gpu_fault_and_fix("14.1", "600.1")[0]
    assert driver.gpu_fault_and_fix(None, "535.161.08") == (
        "torch is built for CPU",
        "run `make setup`, which installs torch for CUDA",
    )


def test_a_process_that_was_given_a_gpu_never_computes_on_the_cpu_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "version"
    file.write_text(CLOSED)
    given = {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setattr(driver, "has_gpu", lambda: True)
    line = driver.gpu_problem("13.0", is_available=False, environ=given, file=file)
    assert line is not None
    assert "needs 580.65.06 or newer: install" in line
    assert driver.gpu_problem("13.0", is_available=True, environ=given, file=file) is None
    # The data's process is given none.
    assert driver.gpu_problem("13.0", is_available=False, environ={"CUDA_VISIBLE_DEVICES": ""}, file=file) is None
    # Nobody is, where the user says so.
    assert driver.gpu_problem("13.0", is_available=False, environ={"CUDA_VISIBLE_DEVICES": "-1"}, file=file) is None
    monkeypatch.setattr(driver, "has_gpu", lambda: False)
    assert driver.gpu_problem("13.0", is_available=False, environ=given, file=file) is None


@pytest.mark.parametrize(("visible", "shown"), [(None, True), ("0", True), ("", False), ("-1", False)])
def test_a_gpu_that_the_user_hides_is_not_used(
    visible: str | None, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "has_gpu", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert driver.shows_gpu() is shown
