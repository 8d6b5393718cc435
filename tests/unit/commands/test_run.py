"""Ends of a run: evaluation, checkpoints and messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_loop import config

from vlmrl.cluster.session import Node, Session
from vlmrl.commands import run as run_module
from vlmrl.errors import ConfigError, DataError, RewardError, StorageError, VlmrlError
from vlmrl.models import tiny
from vlmrl.observe import report as report_module
from vlmrl.observe.run_folder import RunFolder
from vlmrl.system import stops
from vlmrl.system.atomic_folders import begin, finish
from vlmrl.system.scratch import sweep
from vlmrl.system.stops import Stopped
from vlmrl.trainer.collect import Ending, ExhaustedError
from vlmrl.trainer.evaluations import Evaluations
from vlmrl.trainer.rl import LoopState
from vlmrl.types import Metrics


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.build("qwen3", folder / "model", size="micro")
    return folder


@pytest.fixture(autouse=True)
def _finds_the_model(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted settings name it `model`: the checks of a run read its configuration."""
    monkeypatch.chdir(models)


class Log:
    """Stands for a run's report and its checkpoints, and records the calls."""

    def __init__(self, saved: Path | None = None) -> None:
        self.lines: list[Any] = []
        self.saved = saved
        self.is_full = False
        self.evaluation_is_pending = self.is_pending_in_checkpoint = False

    @contextmanager
    def phase(self, name: str) -> Any:
        yield

    def say(self, what: str) -> None:
        self.lines.append(what)

    def evaluation(self, step: int, metrics: Metrics) -> None:
        self.lines.append((step, metrics))

    def save_last_step(self) -> Path | None:
        self.lines.append("checkpoint")
        if self.is_full:
            raise StorageError("the disk is full")
        return self.saved

    def save(self, step: int, state: LoopState, *, force: bool) -> None:
        self.lines.append(("save", step, force))
        self.is_pending_in_checkpoint = self.evaluation_is_pending
        if self.is_full:
            raise StorageError("the disk is full")

    def finish(self, *, has_adapter: bool) -> None:
        self.lines.append("models")


class Evaluated(Evaluations):
    """Evaluations that return at once, or fail."""

    failure: VlmrlError | None = None

    def run(self, step: int) -> Metrics:
        if self.failure is not None:
            raise self.failure
        self.last_evaluated = step
        return {"eval/toy/pass@1": 1.0}


def evaluations(log: Log, **changes: Any) -> Evaluated:
    return Evaluated(config(**changes), lambda step: {}, log, log, last=50)  # type: ignore[arg-type]


SOLVED = Ending(7, reason="the run ends after step 7, its prompts are solved", is_solved=True)


def test_a_solved_run_is_evaluated_and_saved() -> None:
    log = Log()
    evaluations(log, ckpt={"save_steps": 5}).finish_early(SOLVED, has_adapter=False)
    assert log.lines == [SOLVED.reason, (7, {"eval/toy/pass@1": 1.0}), "checkpoint"]


def test_a_solved_run_without_checkpoints_writes_none() -> None:
    log = Log()
    evaluations(log).finish_early(SOLVED, has_adapter=False)
    assert "checkpoint" not in log.lines


def test_a_step_is_not_evaluated_twice() -> None:
    log = Log()
    ends = evaluations(log, eval={"dataset": "toy", "steps": 7})
    assert ends.after_step(7) == {"eval/toy/pass@1": 1.0}
    ends.finish_early(Ending(7, reason="the data are drawn", left_out=3), has_adapter=False)
    assert log.lines == ["the data are drawn", (7, {"data/left_out": 3.0})]


def test_a_run_that_made_its_last_step_is_not_evaluated_again() -> None:
    log = Log()
    evaluations(log).finish_early(Ending(50), has_adapter=False)
    assert log.lines == []


def test_the_model_is_saved_when_the_last_evaluation_fails() -> None:
    log = Log()
    ends = evaluations(log)
    ends.failure = RewardError("no server responds")
    with pytest.raises(RewardError, match="evaluation after step 7, whose model is saved: no server responds"):
        ends.finish_early(SOLVED, has_adapter=False)
    assert log.lines[-1] == "models"


@pytest.mark.parametrize("step", [7, 50])
def test_an_evaluation_that_failed_is_made_by_the_resumed_run(step: int) -> None:
    log = Log()
    ends = evaluations(log, eval={"dataset": "toy", "steps": 7})
    ends.failure = RewardError("no server responds")
    assert ends.after_step(step) == {}
    with pytest.raises(RewardError, match=f"evaluation after step {step}"):
        ends.save(step, LoopState(0.0), has_adapter=False)
    assert log.is_pending_in_checkpoint


def test_an_exhausted_run_names_its_last_checkpoint(tmp_path: Path) -> None:
    error = ExhaustedError("kept 0 of 60 groups")
    assert evaluations(Log()).save_on_error(error) is error, "nothing was learnt"
    folder = tmp_path / "checkpoints/step_000007"
    raised = evaluations(Log(folder)).save_on_error(error)
    assert (
        str(raised)
        == f"kept 0 of 60 groups; the steps before it are saved: resume from {folder} with --ckpt.load_enable"
    )
    assert isinstance(raised, ExhaustedError)


def test_a_run_whose_rewards_fail_names_its_last_checkpoint(tmp_path: Path) -> None:
    log = Log(tmp_path)
    raised = evaluations(log).save_on_error(RewardError("7 of 64 responses could not be scored"))
    assert type(raised) is RewardError
    assert str(raised) == (
        f"7 of 64 responses could not be scored; the steps before it are saved: resume from {tmp_path} with "
        "--ckpt.load_enable"
    )
    run = evaluations(log)
    run.error = RewardError("evaluation after step 7, which is saved for --ckpt.load_enable: nobody listens")
    assert run.save_on_error(run.error) is run.error
    assert log.lines == ["checkpoint"]


def test_a_full_disk_does_not_hide_why_a_run_ended() -> None:
    log = Log()
    log.is_full = True
    run = evaluations(log)
    raised = run.save_on_error(RewardError("7 of 64 responses could not be scored"))
    assert type(raised) is RewardError
    assert str(raised) == "7 of 64 responses could not be scored; its last step is not saved: the disk is full"
    with pytest.raises(StorageError, match=r"^the disk is full$"):
        run.save(7, LoopState(0.0), has_adapter=False)
    run.error = RewardError("evaluation after step 7: nobody listens")
    with pytest.raises(RewardError, match=r"^evaluation after step 7: nobody listens; but the disk is full$"):
        run.save(7, LoopState(0.0), has_adapter=False)


def test_a_stop_interrupts_an_evaluation_but_not_its_step() -> None:
    log = Log()
    ends = evaluations(log, eval={"dataset": "toy", "steps": 7})

    def at(step: int) -> Metrics:
        with stops.interruptible_wait():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        return {}

    ends.run = at  # type: ignore[method-assign]
    with stops.handle_signals(60), stops.only_in_waits():
        with stops.uninterrupted():
            assert ends.after_step(7) == {}
            ends.save(7, LoopState(0.0), has_adapter=False)
        with pytest.raises(Stopped):
            stops.raise_if_requested()
    assert log.evaluation_is_pending
    assert log.lines == [("save", 7, False)]


def test_the_folder_is_checked_again_once_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)

    @contextmanager
    def waited_for(root: Path, **_: Any) -> Any:
        folder.config.write_text("train: {}\n")
        folder.metrics.write_text('{"step": 1}\n')
        yield

    monkeypatch.setattr(run_module, "run_lock", waited_for)
    monkeypatch.setattr(run_module, "session", lambda **options: pytest.fail("it has begun"))
    with pytest.raises(ConfigError, match="holds another run"), run_module.run_session(config(), folder, []):
        pytest.fail("it has begun")


class Table:
    """A policy with a parameter table."""

    def table(self) -> list[tuple[str, int, int]]:
        return [("language", 1, 1)]


@contextmanager
def eight_cores(**options: object) -> Iterator[Session]:
    """A session on one machine, without Ray."""
    yield Session((Node(id="", num_cpus=8, num_gpus=0),))


def test_a_resume_that_is_refused_keeps_the_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "session", eight_cores)
    folder = RunFolder(tmp_path)
    folder.checkpoint(4).mkdir(parents=True)
    folder.config.write_text("# Written by vlmrl: theirs\n")
    mine = config(ckpt={"load_enable": True})
    with pytest.raises(DataError), run_module.run_session(mine, folder, []):
        raise DataError("the checkpoint was made with other data")
    assert "theirs" in folder.config.read_text()
    with run_module.run_session(mine, folder, []) as (_, report):
        run_module.begin_report(mine, report, folder, Table(), last=5, done=4)  # type: ignore[arg-type]
    assert "theirs" not in folder.config.read_text()


@pytest.mark.parametrize("error", [None, DataError("a row has no image")])
def test_a_card_is_written_with_its_weights_and_stays_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: DataError | None
) -> None:
    def run(step: int, *written: Path, **settings: Any) -> str:
        expected: AbstractContextManager[Any] = pytest.raises(DataError) if error is not None else nullcontext()
        with expected, run_module.run_session(config(**settings), folder, []):
            folder.metrics.write_text(f'{{"step": {step}}}\n')
            for model in written:
                (begin(model) / "model.safetensors").write_bytes(b"weights")
                finish(model)
            if error is not None:
                raise error
        return (folder.model / "README.md").read_text()

    monkeypatch.setattr(run_module, "session", eight_cores)
    folder = RunFolder(tmp_path)
    assert "after 60 steps" in run(60, folder.model)
    folder.checkpoint(60).mkdir(parents=True)
    assert "after 60 steps" in run(80, folder.critic, ckpt={"load_enable": True})
    assert "after 80 steps" in (folder.critic / "README.md").read_text()
    assert "after 80 steps" in run(80, folder.model, ckpt={"load_enable": True})


@pytest.mark.parametrize(("queue", "num_cpus"), [(0, 8), (1, 4)])
def test_roles_of_an_asynchronous_run_on_cpu_get_half_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: int, num_cpus: int
) -> None:
    monkeypatch.setattr(run_module, "session", eight_cores)
    train = {"batch_size": 4, "async_enable": True, "async_queue_size": queue}
    settings = config(train=train, algo={"advantage": {"is_correction_enable": True}})
    with run_module.run_session(settings, RunFolder(tmp_path), []) as (builder, _):
        assert [node.num_cpus for node in builder.machines.nodes] == [num_cpus]


@pytest.mark.parametrize("error", [None, DataError("a row has no image")])
def test_the_last_plot_is_drawn_while_roles_and_ray_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: DataError | None
) -> None:
    have_stopped, is_drawn = threading.Event(), threading.Event()

    @contextmanager
    def machines(**options: object) -> Iterator[Session]:
        try:
            yield Session((Node(id="", num_cpus=8, num_gpus=0),))
        finally:
            have_stopped.set()

    def draw(_: Path, __: Path) -> None:
        if have_stopped.wait(10):
            is_drawn.set()

    monkeypatch.setattr(run_module, "session", machines)
    monkeypatch.setattr(report_module, "draw_curves", draw)
    expected: AbstractContextManager[Any] = nullcontext()
    if error is not None:
        expected = pytest.raises(DataError, match="a row has no image")
    with expected, run_module.run_session(config(), RunFolder(tmp_path), []) as (_, report):
        report.begin(total_steps=1, done=0)
        report.step(1, {"reward/mean": 0.5})
        if error is not None:
            raise error
    assert is_drawn.is_set()


def test_a_run_that_is_killed_while_it_is_checked_leaves_only_its_scratch_folder(tmp_path: Path) -> None:
    model = tiny.build("qwen2_5_vl", tmp_path / "model", size="micro")
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('imported').touch()\ntime.sleep(60)\n"
        "def reward(response): return 1.0\n"
    )
    words = ["--actor.model_name_or_path", str(model), "--data.prompt_dataset", "visual_math?size=32"]
    words += ["--ckpt.output_dir", "out", "--reward.remote_url", f"{tmp_path}/slow.py:reward"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"}
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as temporary:
        command = [sys.executable, "-m", "vlmrl", "rl", *words]
        with subprocess.Popen(command, env=environment | {"TMPDIR": temporary}, cwd=tmp_path) as run:
            deadline = time.monotonic() + 60
            while not (tmp_path / "imported").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            family = psutil.Process(run.pid).children(recursive=True)
            run.kill()
        for process in family:  # some end only once they have imported their libraries, or the function
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        assert (tmp_path / "imported").exists()
        (left,) = Path(temporary).iterdir()
        assert left.name.startswith("vlmrl-run-")
        os.utime(left, (0, 0))
        sweep(left.parent)  # which is what the next run does
        assert not left.exists()
