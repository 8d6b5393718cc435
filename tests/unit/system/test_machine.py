"""Checks of a machine: findings, fixes, and refused runs."""

import sys
from collections import namedtuple
from pathlib import Path

import pytest

from vlmrl import cli
from vlmrl.commands import preflight
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ClusterError
from vlmrl.system import machine
from vlmrl.system.machine import GIB, Finding

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("free", "ok", "essential"), [(8.0, True, True), (0.5, False, False), (0.2, False, True)], ids=str
)
def test_low_shared_memory_is_a_warning_and_too_little_a_failure(
    free: float, ok: bool, essential: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(8 * GIB, 0, free * GIB))
    finding = machine.shared_memory(tmp_path)
    assert (finding.ok, finding.essential) == (ok, essential)
    assert finding.detail == f"{free:.2f} GiB free of 8.00 in {tmp_path}"
    assert ok or "--shm-size=8g" in finding.fix


def test_missing_shared_memory_says_what_to_do(tmp_path: Path) -> None:
    finding = machine.shared_memory(tmp_path / "nowhere")
    assert (finding.ok, finding.essential) == (False, True)
    assert finding.detail.endswith("nowhere is not there")
    assert "--shm-size" in finding.fix


@pytest.mark.parametrize(("soft", "ok", "essential"), [(4096, True, True), (512, False, False), (128, False, True)])
def test_too_few_open_files_are_reported_with_a_fix(
    soft: int, ok: bool, essential: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (soft, 8192))
    finding = machine.open_files()
    assert (finding.ok, finding.essential, finding.detail) == (ok, essential, f"at most {soft} open files")
    assert ok or finding.fix == "run `ulimit -n 8192` first"


def test_too_low_a_hard_limit_on_open_files_has_a_fix_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (256, 256))
    assert machine.open_files().fix.startswith("raise the hard limit")


def test_the_disk_is_that_of_the_folder_that_a_run_creates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: asked.append(path) or Usage(GIB, 0, 2**20))
    finding = machine.disk(tmp_path / "runs" / "one")
    assert asked == [tmp_path]
    assert (finding.ok, finding.essential, finding.detail) == (False, True, f"0.0 GiB free in {tmp_path}")
    (tmp_path / "file").touch()
    assert machine.disk(tmp_path / "file" / "run").detail == f"{tmp_path / 'file'} is not a folder"


def test_a_folder_that_cannot_be_written_to_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    finding = machine.disk(tmp_path)
    assert (finding.ok, finding.essential, finding.detail) == (False, True, f"{tmp_path} is not writable")


@pytest.mark.parametrize("way", [[], ["--dry-run"]])
def test_a_run_into_another_users_folder_is_refused_in_one_line(
    way: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exists = Path.exists

    def closed(path: Path) -> bool:
        if tmp_path in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", closed)
    monkeypatch.setattr(machine.os, "access", lambda path, mode: path != tmp_path)
    words = ["--actor.model_name_or_path", "/no/such/model", "--data.prompt_dataset", "d", "--ckpt.output_dir"]
    assert cli.main(["rl", *words, str(tmp_path / "theirs" / "out"), *way]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "Permission denied" in stderr
    finding = machine.disk(tmp_path / "theirs" / "out")
    assert (finding.ok, finding.detail) == (False, f"{tmp_path} is not writable")


def test_a_home_folder_of_an_unknown_user_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--actor.model_name_or_path", "/no/such/model", "--data.prompt_dataset", "d", "--ckpt.output_dir"]
    assert cli.main(["rl", *words, "~no-such-user/out"]) == 2
    assert "give the full path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "cuda", "ok"),
    [
        ("535.104.05", "12.8", True),
        ("520.61.05", "12.8", False),
        ("580.65.05", "13.0", False),
        ("580.65.06", "13.0", True),
    ],
)
def test_an_old_driver_is_reported_with_the_required_one(
    version: str, cuda: str, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "installed_driver", lambda: version)
    monkeypatch.setattr(machine, "_cuda_of_torch", lambda: cuda)
    finding = machine.driver()
    assert (finding.ok, finding.essential) == (ok, True)
    assert ok or ("580.65.06" if cuda == "13.0" else "525.60.13") in finding.fix


def test_torchs_cuda_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('nobody imports it')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for line, wanted in (("cuda: Optional[str] = '13.0'", "13.0"), ("cuda: Optional[str] = None", None)):
        (package / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
        assert machine._cuda_of_torch() == wanted


def test_a_gpu_that_torch_does_not_see_is_a_failure_unless_it_was_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    finding = machine.devices()
    assert (finding.ok, finding.essential) == (False, True)
    assert finding.detail.endswith(", and CUDA_VISIBLE_DEVICES=7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.devices().ok


def test_all_problems_are_reported_together_and_warnings_are_not_refused() -> None:
    fine = Finding("a", ok=True, essential=True, detail="there")
    short = Finding("b", ok=False, essential=False, detail="little", fix="get more")
    gone = Finding("c", ok=False, essential=True, detail="nothing", fix="get some")
    assert machine.require([fine, short]) == ["b: little: get more"]
    with pytest.raises(ClusterError, match=r"^b: little: get more; c: nothing: get some$"):
        machine.require([fine, short, gone])


def test_a_run_that_joins_a_cluster_does_not_check_local_devices(tmp_path: Path) -> None:
    alone, joining = (machine.run_checks(tmp_path, joins_cluster=joins) for joins in (False, True))
    assert {finding.name for finding in joining} == {"open files", "disk"}
    assert {finding.name for finding in alone} >= {"shared memory", "driver", "devices", "disk", "open files"}


@pytest.mark.parametrize("way", [[], ["--dry-run"]])
def test_a_run_is_refused_before_anything_starts(
    way: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (64, 4096))
    words = ["--actor.model_name_or_path", "/no/such/model", "--data.prompt_dataset", "d", "--ckpt.output_dir"]
    assert cli.main(["rl", *words, str(tmp_path / "out"), *way]) == 2
    stderr = capsys.readouterr().err
    assert stderr == "vlmrl rl: open files: at most 64 open files: run `ulimit -n 4096` first\n"
    assert not (tmp_path / "out").exists()


def test_a_run_checks_its_own_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(
        machine, "run_checks", lambda output, *, joins_cluster: asked.append((output, joins_cluster)) or []
    )
    words = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--ckpt.output_dir", str(tmp_path)]
    assert preflight.check_machine(load(RlConfig, words)) == []
    assert asked == [(tmp_path, True)]
