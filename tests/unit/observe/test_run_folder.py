import os
from pathlib import Path

import pytest

from vlmrl.errors import ConfigError
from vlmrl.observe.run_folder import RunFolder

SETTINGS = "# vlmrl rl --config config.yaml\nactor: {}\n"


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check(resume=False, has_checkpoint=False)
    folder.metrics.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds another run: continue it with --ckpt.load_enable"):
        folder.check(resume=False, has_checkpoint=False)


def test_a_run_with_checkpoints_may_go_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("{}\n")
    folder.check(resume=True, has_checkpoint=True)


def test_a_run_killed_before_its_first_checkpoint_may_start_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text(SETTINGS)
    folder.check(resume=True, has_checkpoint=False)


def test_a_run_that_ended_before_its_first_step_may_be_started_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text(SETTINGS)
    folder.check(resume=False, has_checkpoint=False)
    folder.parameters.write_text("part\n")
    folder.metrics.write_text('{"step": 0, "eval/toy/pass@1": 0.5}\n')
    folder.check(resume=False, has_checkpoint=False)


@pytest.mark.parametrize("left", ["step", "evaluation", "transcript", "checkpoint", "best"])
def test_a_run_that_has_something_to_lose_is_not_started_again(left: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text(SETTINGS)
    if left != "evaluation":
        folder.parameters.write_text("part\n")
    if left in ("step", "evaluation"):
        folder.metrics.write_text(f'{{"step": {int(left == "step")}, "reward/mean": 0.5}}\n')
    if left == "transcript":  # logger.logging_steps may have left its numbers out
        folder.rollouts.mkdir()
        (folder.rollouts / "step_000001.jsonl").touch()
    if left == "best":
        folder.best.mkdir()
    with pytest.raises(ConfigError, match="holds another run"):
        folder.check(resume=False, has_checkpoint=left == "checkpoint")


@pytest.mark.parametrize("left", ["model", "adapter"])
def test_a_finished_run_is_not_run_over(left: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / left).mkdir()
    with pytest.raises(ConfigError, match="holds a finished run without checkpoints"):
        folder.check(resume=True, has_checkpoint=False)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(file).check(resume=False, has_checkpoint=False)
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder(file / "below").open()


def test_a_new_folder_is_open_to_this_user_alone_and_one_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        RunFolder(tmp_path / "runs" / "new").open()
        (tmp_path / "shared").mkdir()
        RunFolder(tmp_path / "shared").open()
    finally:
        os.umask(mask)
    assert (tmp_path / "runs" / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("theirs", ["model", "adapter", "best", "checkpoints/step_000001", "config.yaml"])
def test_what_no_run_has_written_is_not_replaced(theirs: str, tmp_path: Path) -> None:
    path = tmp_path / theirs
    if path.suffix:
        path.write_text("# my own settings\nactor: {}\n")
    else:
        path.mkdir(parents=True)
    folder, has_checkpoint = RunFolder(tmp_path), theirs.startswith("checkpoints")
    with pytest.raises(ConfigError, match=rf"{theirs.partition('/')[0]} there was not written by a run, and this one"):
        folder.check(resume=False, has_checkpoint=has_checkpoint)
    if not path.suffix:
        folder.check(resume=False, has_checkpoint=has_checkpoint, learns=False)


def test_an_evaluation_is_not_told_to_go_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds another run: choose another --ckpt.output_dir"):
        folder.check(resume=False, has_checkpoint=False, learns=False)
