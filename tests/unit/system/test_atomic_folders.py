from pathlib import Path

import pytest

from vlmrl.system.atomic_folders import begin, checkpoints, finish, prune, remove_partial


def _checkpoint(folder: Path, text: str) -> None:
    (begin(folder) / "weights").write_text(text)
    finish(folder)


def test_a_folder_does_not_exist_until_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "step_000001"
    (begin(folder) / "weights").write_text("half")
    assert not folder.exists()
    assert checkpoints(tmp_path) == []
    finish(folder)
    assert (folder / "weights").read_text() == "half"
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_a_newer_folder_replaces_an_older_one_completely(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    _checkpoint(folder, "old")
    (folder / "only_in_old").touch()
    _checkpoint(folder, "new")
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == [("weights", "new")]
    assert list(tmp_path.iterdir()) == [folder]


def test_leftovers_of_a_killed_run_are_not_mixed_into_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "step_000002"
    (begin(folder) / "stale").touch()
    _checkpoint(folder, "new")
    assert [p.name for p in folder.iterdir()] == ["weights"]


def test_partial_folders_are_ignored_and_removed(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "step_000001", "whole")
    partial = begin(tmp_path / "step_000002")
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000001"]
    assert remove_partial(tmp_path) == [partial]
    assert remove_partial(tmp_path) == []
    assert remove_partial(tmp_path / "never_made") == []


def test_a_folder_killed_between_two_renames_is_restored(tmp_path: Path) -> None:
    for name, text in (("best.old.tmp", "old"), ("best.tmp", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    assert remove_partial(tmp_path) == [tmp_path / "best.old.tmp"]
    assert (tmp_path / "best" / "file").read_text() == "new"


def test_a_partly_deleted_folder_is_not_restored(tmp_path: Path) -> None:
    (tmp_path / "step_000002.old.tmp").mkdir()
    remove_partial(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pruning_keeps_the_newest_by_step_number(tmp_path: Path) -> None:
    for step in (999998, 1000000, 2, 999999):
        _checkpoint(tmp_path / f"step_{step:06d}", str(step))
    (tmp_path / "step_notes").mkdir()
    deleted = prune(tmp_path, keep=2)
    assert [p.name for p in deleted] == ["step_000002", "step_999998"]
    assert [p.name for p in checkpoints(tmp_path)] == ["step_999999", "step_1000000"]
    assert (tmp_path / "step_notes").exists()
    assert prune(tmp_path, keep=2) == []


def test_an_older_folder_is_restored_when_the_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "weights").write_text("old")
    written = begin(tmp_path / "best")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == written:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space left"):
        finish(tmp_path / "best")
    assert (tmp_path / "best" / "weights").read_text() == "old"
