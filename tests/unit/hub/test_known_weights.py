from pathlib import Path

from vlmrl.hub.known_weights import KnownWeights
from vlmrl.observe.run_folder import RunFolder
from vlmrl.system.atomic_folders import begin, finish, partial, remove_partial


def write(folder: Path, name: str = "model.safetensors") -> None:
    """Write a model as a run does."""
    (begin(folder) / name).write_bytes(b"weights")
    finish(folder)


def test_only_new_weights_need_a_card(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for folder in (run.model, run.critic):
        write(folder)
    known = KnownWeights(run)
    assert not any(map(known.needs_card, run.models))
    write(run.model)  # the same bytes
    write(run.adapter, "adapter_model.safetensors")
    (run.critic / "curves.png").touch()
    assert [folder for folder in run.models if known.needs_card(folder)] == [run.model, run.adapter]


def test_a_best_model_without_a_card_needs_one_because_it_names_its_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for folder in (run.model, run.best):
        write(folder)
    known = KnownWeights(run)
    assert known.needs_card(run.best)
    assert not known.needs_card(run.model), "nobody knows its step"
    (run.best / "README.md").touch()
    assert not known.needs_card(run.best)


def test_a_model_that_a_killed_run_was_replacing_is_not_new(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write(run.model)
    run.model.rename(partial(run.model))  # killed between the two renames
    run.model.with_name("model.old.tmp").mkdir()
    known = KnownWeights(run)
    remove_partial(tmp_path, "model")
    assert run.model.is_dir()
    assert not known.needs_card(run.model)
