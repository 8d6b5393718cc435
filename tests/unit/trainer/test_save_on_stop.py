"""Checkpoints of a run that is asked to stop, or by SIGUSR1 to save."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from recording_roles import RecordingReport, RecordingRole, run_checkpoints
from scripted_loop import config

from vlmrl.config.stages import SftConfig
from vlmrl.errors import StorageError
from vlmrl.observe.run_folder import RunFolder
from vlmrl.system import stops
from vlmrl.system.stops import Stopped
from vlmrl.trainer.rl import LoopState
from vlmrl.trainer.run_checkpoints import RunCheckpoints


@pytest.fixture
def log() -> list[str]:
    return []


def stop() -> Stopped:
    return Stopped(signal.SIGTERM)


def test_a_stopped_run_saves_the_last_step_and_says_how_to_resume(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log)
    run.save(1, LoopState(0.5))

    def step() -> None:
        with stops.interruptible_wait():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    with pytest.raises(Stopped) as stopped, stops.handle_signals(60), run.saving_on_stop():
        step()
    folder = tmp_path / "checkpoints/step_000001"
    assert log == ["critic step_000001", "policy step_000001"], "ckpt.save_steps is 2"
    assert str(stopped.value) == f"stopped by SIGTERM: after step 1; resume from {folder} with --ckpt.load_enable"


def stopped_after(step: int, root: Path, log: list[str], **ckpt: Any) -> str:
    """The message of a run that is stopped after a step."""
    policy = RecordingRole("policy", log)
    run = RunCheckpoints(config(ckpt=ckpt), RunFolder(root), policy, policy, RecordingReport())  # type: ignore[arg-type]
    for number in range(1, step + 1):
        run.save(number, LoopState(0.0))
    return str(run.save_on_stop(stop()))


def test_a_run_without_checkpoints_saves_none_on_stop_by_default(tmp_path: Path, log: list[str]) -> None:
    assert stopped_after(0, tmp_path, log) == "stopped by SIGTERM: before its first step was finished"
    lost = "stopped by SIGTERM: after step 1, and nothing of it is saved (ckpt.save_on_stop)"
    assert stopped_after(1, tmp_path, log) == lost
    assert log == []
    assert "resume from" in stopped_after(1, tmp_path, log, save_on_stop=True)
    assert log == ["policy step_000001"]


@pytest.mark.parametrize("save_steps", [-1, 2])
def test_a_stop_does_not_interrupt_the_only_model_of_a_run(tmp_path: Path, log: list[str], save_steps: int) -> None:
    policy = RecordingRole("policy", log)
    ckpt = {"save_steps": save_steps}
    run = RunCheckpoints(config(ckpt=ckpt), RunFolder(tmp_path), policy, policy, RecordingReport())  # type: ignore[arg-type]

    def save_model(folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        with stops.interruptible_wait():
            RecordingRole.save_model(policy, folder)

    policy.save_model = save_model  # type: ignore[method-assign]
    run.save(1, LoopState(0.0))
    if save_steps > 0:
        with pytest.raises(Stopped, match="after step 1; resume from"), stops.handle_signals(60), run.saving_on_stop():
            run.finish(has_adapter=False)
        assert log == ["policy step_000001"]
        return
    with stops.handle_signals(60), run.saving_on_stop():
        run.finish(has_adapter=False)
        with stops.interruptible_wait():
            log.append("roles end")
    assert log == ["policy model model", "roles end"]


def test_saving_on_stop_can_be_turned_off(tmp_path: Path, log: list[str]) -> None:
    message = stopped_after(3, tmp_path, log, save_steps=2, save_on_stop=False)
    assert message.startswith(
        f"stopped by SIGTERM: after step 3; resume from {tmp_path / 'checkpoints/step_000002'} with"
    )
    assert log == ["policy step_000002"]


def test_supervised_training_is_saved_on_stop(tmp_path: Path, log: list[str]) -> None:
    settings = SftConfig.model_validate(
        {"actor": {"model_name_or_path": "m"}, "data": {"prompt_dataset": "d"}, "ckpt": {"save_steps": 5}}
    )
    policy = RecordingRole("policy", log)
    run = RunCheckpoints(settings, RunFolder(tmp_path), policy, policy, RecordingReport())  # type: ignore[arg-type]
    run.save(3)
    run.save_on_stop(stop())
    assert log == ["policy step_000003"]


def test_sigusr1_saves_the_step_and_the_run_continues(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log)
    with stops.handle_signals(60):
        os.kill(os.getpid(), signal.SIGUSR1)
        run.save(1, LoopState(0.5))
        run.save(3, LoopState(0.5))
    assert log == ["critic step_000001", "policy step_000001"]


def test_an_interrupted_evaluation_is_pending_after_resuming(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log)
    run.evaluation_is_pending = True
    run.save(2, LoopState(0.5))
    run = RunCheckpoints(run.config, run.folder, run.data, run.policy, run.report, run.critic)
    assert not run.evaluation_is_pending
    run.restore()
    assert run.evaluation_is_pending


@pytest.mark.parametrize("older", [False, True])
def test_a_failed_save_on_stop_is_still_a_stop(tmp_path: Path, log: list[str], older: bool) -> None:
    run = run_checkpoints(tmp_path, log)
    if older:
        run.save(2, LoopState(0.5))
    run.save(3, LoopState(0.5))

    def full(folder: Path, extra: dict[str, Any]) -> None:
        raise StorageError("the disk is full")

    run.policy.save_checkpoint = full  # type: ignore[method-assign]
    message = "stopped by SIGTERM: after step 3, which is not saved (the disk is full)"
    if older:
        message += f"; resume from {tmp_path / 'checkpoints/step_000002'} with --ckpt.load_enable"
    assert str(run.save_on_stop(stop())) == message
