"""Saving and restoring the state of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recording_roles import ADAPTIVE, RecordingReport, RecordingRole, run_checkpoints
from scripted_loop import config
from small_disk import small_disk

from vlmrl.errors import ConfigError, MachineError, StorageError
from vlmrl.observe.run_folder import RunFolder
from vlmrl.trainer.filtering import RewardRange
from vlmrl.trainer.rl import LoopState
from vlmrl.trainer.run_checkpoints import RunCheckpoints, naming_checkpoint


@pytest.fixture
def log() -> list[str]:
    return []


def test_a_disk_error_names_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    error = StorageError("metrics.jsonl cannot be written to /run: No space left on device")
    with pytest.raises(StorageError) as caught, naming_checkpoint(tmp_path):
        raise error
    assert caught.value is error, "there is none"
    for name in ("step_000002", "step_000010", "step_000012.tmp"):
        (tmp_path / name).mkdir()
    with pytest.raises(StorageError) as caught, naming_checkpoint(tmp_path):
        raise error
    assert str(caught.value) == f"{error}; {tmp_path}/step_000010 is complete: resume from it with --ckpt.load_enable"


def test_the_loss_of_a_machine_names_the_checkpoint_or_says_that_there_is_none(tmp_path: Path) -> None:
    error = MachineError("machine 10.0.0.2 died during the run")
    with pytest.raises(MachineError) as caught, naming_checkpoint(tmp_path):
        raise error
    assert str(caught.value) == f"{error}; there is no checkpoint yet: start again with the same command"
    (tmp_path / "step_000010").mkdir()
    with pytest.raises(MachineError) as caught, naming_checkpoint(tmp_path):
        raise error
    assert str(caught.value) == f"{error}; {tmp_path}/step_000010 is complete: resume from it with --ckpt.load_enable"


def test_the_policys_checkpoint_is_written_last(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log)
    for step in range(1, 5):
        run.save(step, LoopState(0.5))
    assert log == [f"{role} step_00000{step}" for step in (2, 4) for role in ("critic", "policy")]
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("step_*"))
    assert left == ["checkpoints/critic/step_000004", "checkpoints/step_000004"], "both are pruned alike"


def test_a_run_resumes_from_its_newest_complete_checkpoint(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log)
    assert run.restore() == (0, None)
    run.save(2, LoopState(0.25))
    # Killed between the two: a critic without its policy counts for nothing.
    (tmp_path / "checkpoints/critic/step_000004").mkdir()
    log.clear()
    assert run.restore() == (2, LoopState(0.25))
    assert log == ["policy from step_000002", "critic from step_000002", "prompts {'position': 7}"]


def test_a_critic_checkpoint_without_its_policy_is_removed(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log)
    run.save(2, LoopState(0.25))
    (tmp_path / "checkpoints/critic/step_000010").mkdir()
    run.restore()
    run.save(4, LoopState(0.25))
    assert [path.name for path in (tmp_path / "checkpoints/critic").iterdir()] == ["step_000004"]


def test_a_fixed_kl_coefficient_follows_the_settings_after_resuming(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log, kl={})
    run.save(2, LoopState(0.25))
    assert run.restore() == (2, LoopState(0.5))


def test_the_best_model_is_replaced_only_by_a_better_one(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log)
    run.keep_best(0, {"eval/toy/pass@1": 0.5})
    assert log == [], "nobody asked"
    settings = config(eval={"dataset": "toy", "steps": 1}, ckpt={"best_metric_key": "eval/toy/pass@1"})
    policy = RecordingRole("policy", log)
    run = RunCheckpoints(settings, RunFolder(tmp_path), policy, policy, RecordingReport())  # type: ignore[arg-type]
    for step, value in enumerate((0.5, 0.75, 0.75, 0.25)):
        run.keep_best(step, {"eval/toy/pass@1": value})
    assert len(log) == 2
    assert '"step": 1' in (tmp_path / "best" / "best.json").read_text()


def test_files_of_others_are_not_removed(tmp_path: Path, log: list[str]) -> None:
    for name in (
        "mine.tmp",
        "best.tmp",
        "best.tmp.tmp",
        "model_ema.old.tmp",
        "checkpoints/step_000002.tmp",
        "checkpoints/mine.tmp",
    ):
        (tmp_path / name).mkdir(parents=True)
    run_checkpoints(tmp_path, log).restore()
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.tmp"))
    assert left == ["checkpoints/mine.tmp", "mine.tmp"]


def test_a_forced_checkpoint_is_written_when_none_is_due(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log)
    run.save(3, LoopState(0.5))
    assert log == []
    run.save(3, LoopState(0.5), force=True)
    assert log == ["critic step_000003", "policy step_000003"]


def filtering(root: Path, log: list[str], **changes: Any) -> RunCheckpoints:
    settings = config(algo={"dynamic_filtering_enable": True}, ckpt={"load_enable": True} | changes)
    prompts, policy = (RecordingRole(name, log) for name in ("prompts", "policy"))
    return RunCheckpoints(settings, RunFolder(root), prompts, policy, RecordingReport())  # type: ignore[arg-type]


def test_the_last_step_can_be_saved_after_the_next_one_has_drawn_prompts(tmp_path: Path, log: list[str]) -> None:
    run = filtering(tmp_path, log)
    assert run.save_last_step() is None, "nothing is finished yet"
    run.save(1, LoopState(0.0, RewardRange(-1.0, 2.0)))
    assert log == [], "ckpt.save_steps is -1"
    run.data.state = lambda: {"position": 99}  # type: ignore[method-assign,assignment]
    assert run.save_last_step() == tmp_path / "checkpoints/step_000001"
    assert run.restore() == (1, LoopState(0.0, RewardRange(-1.0, 2.0)))
    assert log == ["policy step_000001", "policy from step_000001", "prompts {'position': 7}"]
    run.save_last_step()
    assert log.count("policy step_000001") == 1, "it is there already"


def test_without_filtering_too_the_last_step_can_be_saved_when_rewards_fail(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log)
    run.save(1, LoopState(0.5))
    assert log == [], "ckpt.save_steps is 2"
    assert run.save_last_step() == tmp_path / "checkpoints/step_000001"
    assert log == ["critic step_000001", "policy step_000001"]


def test_an_evaluation_without_scores_keeps_the_best_model(tmp_path: Path, log: list[str]) -> None:
    settings = config(eval={"dataset": "toy", "steps": 1}, ckpt={"best_metric_key": "eval/toy/pass@1"})
    policy = RecordingRole("policy", log)
    run = RunCheckpoints(settings, RunFolder(tmp_path), policy, policy, RecordingReport())  # type: ignore[arg-type]
    run.keep_best(1, {"eval/toy/failed": 4.0})
    assert log == []
    with pytest.raises(ConfigError, match="is not measured by the evaluation"):
        run.keep_best(1, {"eval/toy/failed": 0.0})


def lines(run: RunCheckpoints) -> list[str]:
    """Lines of a run's report, except on missing checksums: the roles of these tests write empty folders."""
    printed: list[str] = run.report.lines  # type: ignore[attr-defined]
    return [line for line in printed if "without checksums" not in line]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


def test_a_run_resumes_from_the_newest_undamaged_checkpoint(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log, max_num=5)
    for step in (2, 4, 6, 8):
        run.save(step, LoopState(step / 10))
    files = ["deepspeed/mp_rank_00_model_states.pt: its checksum differs", "random_rank_1.pt: it is missing"]
    run.policy.damage = {"step_000008": files, "step_000002": files}  # type: ignore[attr-defined]
    assert run.critic is not None
    run.critic.damage = {"step_000006": ["extra.json: it is missing"]}  # type: ignore[attr-defined]
    log.clear()
    assert run.restore() == (4, LoopState(0.4))
    assert log[:2] == ["policy from step_000004", "critic from step_000004"]
    for line, step, why in zip(
        lines(run), (8, 6), (f"{files[0]} (and 1 more)", "critic/step_000006: extra.json: it is missing"), strict=True
    ):
        assert line == (
            f"checkpoint step_00000{step} is damaged: {why}; it is renamed to step_00000{step}.damaged, and the run "
            "resumes from step_000004"
        )
    kept = ["step_000002", "step_000004", "step_000006.damaged", "step_000008.damaged"]
    assert names(tmp_path / "checkpoints") == names(tmp_path / "checkpoints/critic") == kept
    # Made again, the step is whole, and what is damaged is not in the way of what comes after.
    run.save(6, LoopState(0.6))
    run.policy.damage = {}  # type: ignore[attr-defined]
    run.critic.damage = {}  # type: ignore[attr-defined]
    assert run.restore() == (6, LoopState(0.6))


def test_a_step_that_is_damaged_twice_is_kept_twice(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log, max_num=5)
    run.policy.damage = {"step_000004": ["extra.json: it is missing"]}  # type: ignore[attr-defined]
    run.save(2, LoopState(0.2))
    for _ in range(2):
        run.save(4, LoopState(0.4))
        run.restore()
    assert names(tmp_path / "checkpoints") == ["step_000002", "step_000004.damaged", "step_000004.damaged1"]


def test_a_missing_critic_makes_a_checkpoint_damaged(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log, max_num=5)
    run.save(2, LoopState(0.2))
    run.save(4, LoopState(0.4))
    (tmp_path / "checkpoints/critic/step_000004").rmdir()
    assert run.restore() == (2, LoopState(0.2))
    assert "critic/step_000004: its folder is gone" in lines(run)[0]


def test_a_run_with_damaged_checkpoints_only_is_refused(tmp_path: Path, log: list[str]) -> None:
    run = run_checkpoints(tmp_path, log, max_num=5)
    run.save(2, LoopState(0.2))
    run.save(4, LoopState(0.4))
    run.policy.damage = {  # type: ignore[attr-defined]
        f"step_00000{step}": ["latest: it is missing"] for step in (2, 4)
    }
    with pytest.raises(ConfigError) as caught:
        run.restore()
    assert str(caught.value) == (
        f"all 2 checkpoints in {tmp_path}/checkpoints are damaged; the newest, step_000004: latest: it is missing: "
        "bring the file back, or start a new run with another --ckpt.output_dir"
    )
    assert names(tmp_path / "checkpoints") == ["step_000002", "step_000004"]


def test_room_for_the_next_checkpoint_is_checked_ahead(tmp_path: Path, log: list[str]) -> None:
    with small_disk(tmp_path / "disk", mib=4) as disk:
        run = run_checkpoints(disk, log, max_num=5)
        run.policy.size = 2**20  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match=r"the checkpoint of step 2 takes about 16\.0 MiB, for which .* no room"):
            run.check_room_ahead(done=0, last=2)
        run.check_room_ahead(done=0, last=1)
        run.policy.size = 1  # type: ignore[attr-defined]
        run.check_room_ahead(done=0, last=2)
        run.save(2, LoopState(0.2))
        (disk / "checkpoints/step_000002/weights").write_bytes(bytes(2 << 20))
        (disk / "checkpoints/critic/step_000002/weights").write_bytes(bytes(1 << 20))
        log.clear()
        with pytest.raises(StorageError) as caught:
            run.save(4, LoopState(0.4))
        assert str(caught.value) == (
            f"the checkpoint of step 4 takes about 3.0 MiB, for which {disk}/checkpoints has no room (1.0 MiB of 4.0 "
            "MiB free): free some space there"
        )
        assert log == [], "nothing was begun"
        (disk / "checkpoints/step_000001").mkdir()
        with pytest.raises(StorageError, match=r"or lower --ckpt\.max_num: it holds 2 checkpoints"):
            run.save(4, LoopState(0.4))
        with pytest.raises(StorageError, match="the checkpoint of step 6 takes about"):
            run.check_room_ahead(done=4, last=6)


def test_a_resumed_run_shows_changed_settings_and_moves_its_schedule(tmp_path: Path, log: list[str]) -> None:
    before = run_checkpoints(tmp_path, log)
    before.save(2, LoopState(0.5))
    before.restore()
    assert lines(before) == [], "nothing changed"
    assert not [line for line in log if " at " in line]

    changed = {
        "algo": {"advantage": {"estimator": "gae"}, "kl": {"init_coef": 0.5} | ADAPTIVE},
        "ckpt": {"save_steps": 3, "load_enable": True, "output_dir": "elsewhere"},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 8, "max_new_tokens": 4},
        "train": {"batch_size": 32},
    }
    report: Any = RecordingReport()
    run = RunCheckpoints(config(**changed), RunFolder(tmp_path), before.data, before.policy, report, before.critic)
    log.clear()
    assert run.restore()[0] == 2
    (line,) = lines(run)
    start, _, settings = line.partition(": ")
    assert start == "resuming after step 2 with other settings"
    assert set(settings.split(", ")) == {
        "rollout.batch_size 2 -> 4",
        "rollout.n_samples_per_prompt 2 -> 8",
        "train.batch_size 4 -> 32",
        "ckpt.save_steps 2 -> 3",
        "ckpt.max_num 1 -> 3",
    }
    # 7 of the 28 prompts of the run are drawn.
    assert log[-2:] == ["policy at 0.25", "critic at 0.25"]


def test_a_changed_learning_rate_is_shown_and_moves_no_schedule(tmp_path: Path, log: list[str]) -> None:
    before = run_checkpoints(tmp_path, log)
    before.save(2, LoopState(0.5))
    actor = {"model_name_or_path": "model", "adam": {"lr": 1e-4}}
    settings = before.config.model_copy(update={"actor": before.config.actor.model_validate(actor)})
    run = RunCheckpoints(settings, RunFolder(tmp_path), before.data, before.policy, RecordingReport(), before.critic)  # type: ignore[arg-type]
    run.restore()
    assert lines(run) == ["resuming after step 2 with other settings: actor.adam.lr 1e-06 -> 0.0001"]
    assert not [line for line in log if " at " in line]
