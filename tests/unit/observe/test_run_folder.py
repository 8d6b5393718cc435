import os
from pathlib import Path

import pytest

from vlmrl.config.dump import dump_yaml
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.errors import ConfigError
from vlmrl.observe.run_folder import RunFolder

SETTINGS = "# Written by vlmrl: vlmrl rl --config config.yaml repeats the run\nactor: {}\n"
RECIPES = sorted((Path(__file__).parents[3] / "examples").rglob("*.yaml"))


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check(resume=False, has_checkpoint=False)
    folder.metrics.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds another run: resume it with --ckpt.load_enable"):
        folder.check(resume=False, has_checkpoint=False)


def test_a_run_with_checkpoints_may_be_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("{}\n")
    folder.check(resume=True, has_checkpoint=True)


def test_a_run_killed_before_its_first_checkpoint_may_be_restarted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text(SETTINGS)
    folder.check(resume=True, has_checkpoint=False)


def test_a_run_that_ended_before_its_first_step_may_be_restarted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text(SETTINGS)
    folder.check(resume=False, has_checkpoint=False)
    folder.parameters.write_text("part\n")
    folder.metrics.write_text('{"step": 0, "eval/toy/pass@1": 0.5}\n')
    folder.check(resume=False, has_checkpoint=False)


@pytest.mark.parametrize("left", ["step", "evaluation", "transcript", "checkpoint", "best"])
def test_a_run_with_results_is_not_overwritten(left: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text(SETTINGS)
    if left != "evaluation":
        folder.parameters.write_text("part\n")
    if left in ("step", "evaluation"):
        folder.metrics.write_text(f'{{"step": {int(left == "step")}, "reward/mean": 0.5}}\n')
    if left == "transcript":  # logger.logging_steps may have skipped its metrics
        folder.rollouts.mkdir()
        (folder.rollouts / "step_000001.jsonl").touch()
    if left == "best":
        folder.best.mkdir()
    with pytest.raises(ConfigError, match="holds another run"):
        folder.check(resume=False, has_checkpoint=left == "checkpoint")


@pytest.mark.parametrize("left", ["model", "adapter"])
def test_a_finished_run_without_checkpoints_cannot_be_resumed(left: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / left).mkdir()
    with pytest.raises(ConfigError, match="holds a finished run without checkpoints"):
        folder.check(resume=True, has_checkpoint=False)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(file).check(resume=False, has_checkpoint=False)
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder(file / "below").open()


def test_a_new_folder_is_private_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["model", "adapter", "best", "checkpoints/step_000001", "config.yaml"])
def test_files_not_written_by_a_run_are_not_replaced(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix:
        path.write_text("# my own settings\nactor: {}\n")
    else:
        path.mkdir(parents=True)
    folder, has_checkpoint = RunFolder(tmp_path), name.startswith("checkpoints")
    with pytest.raises(ConfigError, match=rf"{name.partition('/')[0]} there was not written by a run, and this one"):
        folder.check(resume=False, has_checkpoint=has_checkpoint)
    if not path.suffix:
        folder.check(resume=False, has_checkpoint=has_checkpoint, learns=False)


@pytest.mark.parametrize("resume", [False, True])
def test_a_copy_of_a_recipe_is_not_replaced(resume: bool, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert len(RECIPES) > 30
    for recipe in RECIPES:
        folder.config.write_bytes(recipe.read_bytes())
        with pytest.raises(ConfigError, match=r"config\.yaml there was not written by a run"):
            folder.check(resume=resume, has_checkpoint=False)


def test_the_settings_of_a_run_may_be_replaced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    words = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--ckpt.output_dir", str(tmp_path)]
    dump_yaml(load(SftConfig, words), folder.config)
    folder.check(resume=False, has_checkpoint=False)


def test_an_evaluation_is_not_advised_to_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds another run: choose another --ckpt.output_dir"):
        folder.check(resume=False, has_checkpoint=False, learns=False)
