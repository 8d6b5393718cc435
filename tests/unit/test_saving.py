"""Which part of a run's state is written when, and what it goes on from."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_loop import config

from vlmrl import stops
from vlmrl.config.run import SftConfig
from vlmrl.errors import ConfigError
from vlmrl.observe.folder import RunFolder
from vlmrl.saving import Saves
from vlmrl.sifting import Seen
from vlmrl.stops import Stopped
from vlmrl.trainer import Carried


class Remembering:
    """A role that notes what it is asked to write, and writes a folder."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.extra: dict[Path, dict[str, Any]] = {}

    def save_checkpoint(self, folder: Path, extra: dict[str, Any] | None = None) -> None:
        self.log.append(f"{self.name} {folder.name}")
        folder.mkdir(parents=True)
        self.extra[folder] = extra or {}

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        self.log.append(f"{self.name} from {folder.name}")
        return self.extra[folder]

    def save_model(self, folder: Path) -> None:
        self.log.append(f"{self.name} model {folder.name}")
        folder.mkdir(parents=True, exist_ok=True)

    save_average = save_model

    def state(self) -> dict[str, int]:
        return {"drawn": 7}

    def load_state(self, state: dict[str, int]) -> None:
        self.log.append(f"{self.name} {state}")


class Silent:
    @contextmanager
    def phase(self, name: str) -> Any:
        yield

    def say(self, what: str) -> None:
        pass


ADAPTIVE = {"target": 0.1, "horizon": 1000}


@pytest.fixture
def log() -> list[str]:
    return []


def saves(root: Path, log: list[str], *, kl: dict[str, Any] = ADAPTIVE, **changes: Any) -> Saves:
    settings = config(
        algo={"advantage": {"estimator": "gae"}, "kl": {"init_coef": 0.5} | kl},
        ckpt={"save_steps": 2, "max_num": 1, "load_enable": True} | changes,
    )
    prompts, policy, critic = (Remembering(name, log) for name in ("prompts", "policy", "critic"))
    return Saves(settings, RunFolder(root), prompts, policy, Silent(), critic)  # type: ignore[arg-type]


def test_the_policys_checkpoint_is_last_so_that_where_it_is_everything_is(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log)
    for step in range(1, 5):
        run.save(step, Carried(0.5))
    assert log == [f"{role} step_00000{step}" for step in (2, 4) for role in ("critic", "policy")]
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("step_*"))
    assert left == ["checkpoints/critic/step_000004", "checkpoints/step_000004"], "both are pruned alike"


def test_a_run_goes_on_from_its_last_whole_checkpoint(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log)
    assert run.restore() == (0, None)
    run.save(2, Carried(0.25))
    # Killed between the two: a critic without its policy counts for nothing.
    (tmp_path / "checkpoints/critic/step_000004").mkdir()
    log.clear()
    assert run.restore() == (2, Carried(0.25))
    assert log == ["policy from step_000002", "critic from step_000002", "prompts {'drawn': 7}"]


def test_a_critic_whose_policy_never_came_does_not_outlive_one_that_is_whole(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log)
    run.save(2, Carried(0.25))
    (tmp_path / "checkpoints/critic/step_000010").mkdir()
    run.restore()
    run.save(4, Carried(0.25))
    assert [path.name for path in (tmp_path / "checkpoints/critic").iterdir()] == ["step_000004"]


def test_a_weight_of_the_kl_that_does_not_adapt_is_the_settings_on_resume_too(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log, kl={})
    run.save(2, Carried(0.25))
    assert run.restore() == (2, Carried(0.5))


def test_the_best_model_is_kept_by_its_metric_and_never_replaced_by_its_equal(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log)
    run.keep_best(0, {"eval/toy/pass@1": 0.5})
    assert log == [], "nobody asked"
    settings = config(eval={"dataset": "toy", "steps": 1}, ckpt={"best_metric_key": "eval/toy/pass@1"})
    policy = Remembering("policy", log)
    run = Saves(settings, RunFolder(tmp_path), policy, policy, Silent())  # type: ignore[arg-type]
    for step, value in enumerate((0.5, 0.75, 0.75, 0.25)):
        run.keep_best(step, {"eval/toy/pass@1": value})
    assert len(log) == 2
    assert '"step": 1' in (tmp_path / "best" / "best.json").read_text()


def test_what_a_run_did_not_write_itself_stays(tmp_path: Path, log: list[str]) -> None:
    for name in (
        "mine.tmp",
        "best.tmp",
        "best.tmp.tmp",
        "model_ema.old.tmp",
        "checkpoints/step_000002.tmp",
        "checkpoints/mine.tmp",
    ):
        (tmp_path / name).mkdir(parents=True)
    saves(tmp_path, log).restore()
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.tmp"))
    assert left == ["checkpoints/mine.tmp", "mine.tmp"]


def test_a_checkpoint_that_has_to_be_is_written_when_none_is_due(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log)
    run.save(3, Carried(0.5))
    assert log == []
    run.save(3, Carried(0.5), must=True)
    assert log == ["critic step_000003", "policy step_000003"]


def filtering(root: Path, log: list[str], **changes: Any) -> Saves:
    settings = config(algo={"dynamic_filtering_enable": True}, ckpt={"load_enable": True} | changes)
    prompts, policy = (Remembering(name, log) for name in ("prompts", "policy"))
    return Saves(settings, RunFolder(root), prompts, policy, Silent())  # type: ignore[arg-type]


def test_the_last_step_can_be_saved_after_the_next_one_has_drawn_prompts(tmp_path: Path, log: list[str]) -> None:
    run = filtering(tmp_path, log)
    assert run.save_finished() is None, "nothing is finished yet"
    run.save(1, Carried(0.0, Seen(-1.0, 2.0)))
    assert log == [], "ckpt.save_steps is -1"
    run.prompts.state = lambda: {"drawn": 99}  # type: ignore[method-assign,assignment]
    assert run.save_finished() == tmp_path / "checkpoints/step_000001"
    assert run.restore() == (1, Carried(0.0, Seen(-1.0, 2.0)))
    assert log == ["policy step_000001", "policy from step_000001", "prompts {'drawn': 7}"]
    run.save_finished()
    assert log.count("policy step_000001") == 1, "it is there already"


def test_without_filtering_too_the_last_step_can_be_saved_when_rewards_fail(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log)
    run.save(1, Carried(0.5))
    assert log == [], "ckpt.save_steps is 2"
    assert run.save_finished() == tmp_path / "checkpoints/step_000001"
    assert log == ["critic step_000001", "policy step_000001"]


def test_a_metric_that_nobody_could_score_leaves_the_best_model_alone(tmp_path: Path, log: list[str]) -> None:
    settings = config(eval={"dataset": "toy", "steps": 1}, ckpt={"best_metric_key": "eval/toy/pass@1"})
    policy = Remembering("policy", log)
    run = Saves(settings, RunFolder(tmp_path), policy, policy, Silent())  # type: ignore[arg-type]
    run.keep_best(1, {"eval/toy/failed": 4.0})
    assert log == []
    with pytest.raises(ConfigError, match="is not what the evaluation measures"):
        run.keep_best(1, {"eval/toy/failed": 0.0})


def stop() -> Stopped:
    return Stopped(signal.SIGTERM)


def test_a_stopped_run_saves_the_last_step_and_says_where_to_go_on(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log)
    run.save(1, Carried(0.5))

    def step() -> None:
        with stops.waiting():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    with pytest.raises(Stopped) as stopped, stops.heeded(60), run.kept():
        step()
    folder = tmp_path / "checkpoints/step_000001"
    assert log == ["critic step_000001", "policy step_000001"], "ckpt.save_steps is 2"
    assert str(stopped.value) == f"stopped by SIGTERM: after step 1; go on from {folder} with --ckpt.load_enable"


def stopped_after(step: int, root: Path, log: list[str], **ckpt: Any) -> str:
    """What a run says that is stopped after a step."""
    policy = Remembering("policy", log)
    run = Saves(config(ckpt=ckpt), RunFolder(root), policy, policy, Silent())  # type: ignore[arg-type]
    for number in range(1, step + 1):
        run.save(number, Carried(0.0))
    return str(run.stopped(stop()))


def test_a_run_without_checkpoints_saves_none_at_a_stop_unless_it_is_asked_to(tmp_path: Path, log: list[str]) -> None:
    assert stopped_after(0, tmp_path, log) == "stopped by SIGTERM: before its first step was done"
    lost = "stopped by SIGTERM: after step 1, and nothing of it is saved (ckpt.save_on_stop)"
    assert stopped_after(1, tmp_path, log) == lost
    assert log == []
    assert "go on from" in stopped_after(1, tmp_path, log, save_on_stop=True)
    assert log == ["policy step_000001"]


def test_a_run_may_do_without_a_checkpoint_at_a_stop(tmp_path: Path, log: list[str]) -> None:
    said = stopped_after(3, tmp_path, log, save_steps=2, save_on_stop=False)
    assert said.startswith(f"stopped by SIGTERM: after step 3; go on from {tmp_path / 'checkpoints/step_000002'} with")
    assert log == ["policy step_000002"]


def test_supervised_training_too_is_saved_at_a_stop(tmp_path: Path, log: list[str]) -> None:
    settings = SftConfig.model_validate(
        {"actor": {"model_name_or_path": "m"}, "data": {"prompt_dataset": "d"}, "ckpt": {"save_steps": 5}}
    )
    policy = Remembering("policy", log)
    run = Saves(settings, RunFolder(tmp_path), policy, policy, Silent())  # type: ignore[arg-type]
    run.save(3)
    run.stopped(stop())
    assert log == ["policy step_000003"]


def test_sigusr1_saves_the_step_and_the_run_goes_on(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log)
    with stops.heeded(60):
        os.kill(os.getpid(), signal.SIGUSR1)
        run.save(1, Carried(0.5))
        run.save(3, Carried(0.5))
    assert log == ["critic step_000001", "policy step_000001"]


def test_an_evaluation_that_a_stop_abandoned_is_owed(tmp_path: Path, log: list[str]) -> None:
    run = saves(tmp_path, log)
    run.owes_evaluation = True
    run.save(2, Carried(0.5))
    run = Saves(run.config, run.folder, run.prompts, run.policy, run.report, run.critic)
    assert not run.owes_evaluation
    run.restore()
    assert run.owes_evaluation
