"""The set-up: its commands, when it runs none, and how it fails. Nothing is installed here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrl import startup
from vlmrl.startup import install

PLAIN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that would have run; each succeeds."""
    steps: list[str] = []

    def step(what: str, alternatives: list[list[str]]) -> None:
        steps.append(" ".join([what, *(["--clear"] if "--clear" in alternatives[0] else [])]))

    monkeypatch.setattr(install, "_step", step)
    monkeypatch.setattr(install, "_succeeds", lambda command, show=False: True)
    return steps


def test_running_again_does_nothing(tmp_path: Path, ran: list[str]) -> None:
    install.install(tmp_path, "cpu")
    assert ran[:2] == ["virtual environment", "torch for CPU"]
    ran.clear()
    install.install(tmp_path, "cpu")
    assert ran == []


def test_changed_pins_install_again_into_the_same_environment(tmp_path: Path, ran: list[str]) -> None:
    install.install(tmp_path, "cpu")
    kind, python, _ = (tmp_path / ".vlmrl-setup").read_text().split()
    (tmp_path / ".vlmrl-setup").write_text(f"{kind} {python} {'0' * 64}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    ran.clear()
    install.install(tmp_path, "cpu")
    assert ran[0] == "torch for CPU"


def test_an_environment_for_cpu_is_rebuilt_when_a_gpu_appears(tmp_path: Path, ran: list[str]) -> None:
    install.install(tmp_path, "cpu")
    ran.clear()
    install.install(tmp_path, "gpu")
    assert ran == ["virtual environment --clear", "the engine and tools of the lock", "vlmrl"]


def test_a_machine_that_does_not_pass_the_doctor_is_not_stamped(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "_succeeds", lambda command, show=False: False)
    with pytest.raises(install.InstallError, match="how to fix it"):
        install.install(tmp_path, "cpu")
    assert not (tmp_path / ".vlmrl-setup").exists()


def test_torchs_own_index_is_used_only_after_the_plain_install_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails, writes = [sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "second"
    succeeds = [sys.executable, "-c", f"open({str(writes)!r}, 'w')"]
    install._step("torch", [fails, succeeds])
    assert writes.exists()
    for commands in (install.commands, install.locked_commands):
        plain, index = commands("cpu", Path("python"))[0][1]
        assert "--index-url" not in plain
        assert install.TORCH_CPU_INDEX in index
    assert capsys.readouterr().out.startswith("  torch ...")


def test_without_the_lock_packages_are_installed_within_the_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[str] = []

    def step(what: str, alternatives: list[list[str]]) -> None:
        steps.append(what)
        if "lock" in what:
            raise install.InstallError("no matching distribution")

    monkeypatch.setattr(install, "_step", step)
    install._install_packages("gpu", Path("python"))
    assert steps == ["the engine and tools of the lock", "vlmrl, its engine and its tools"]
    assert "Packages of the lock are missing" in capsys.readouterr().out


def test_a_hash_that_differs_from_the_locks_stops_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    says = "raise SystemExit('ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE')"
    ran: list[str] = []

    def commands(kind: install.Kind, python: Path) -> list[tuple[str, list[list[str]]]]:
        return [("the lock", [[sys.executable, "-c", says]])]

    monkeypatch.setattr(install, "locked_commands", commands)
    monkeypatch.setattr(install, "commands", lambda kind, python: ran.append(kind))
    with pytest.raises(install.MismatchError, match="the hash of a package differs from the lock's"):
        install._install_packages("cpu", Path("python"))
    assert ran == []


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le"])
def test_another_machine_has_no_lock(machine: str, monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    monkeypatch.setattr(install.platform, "machine", lambda: machine)
    install._install_packages("gpu", Path("python"))
    assert ran == ["vlmrl, its engine and its tools"]


def test_a_failed_command_is_shown_with_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(install.InstallError, match="this command failed"):
        install._step("nothing", [[sys.executable, "-c", "raise SystemExit('no room left')"]])
    assert "no room left" in capsys.readouterr().err


def test_cpu_environments_lose_the_two_packages_that_break_imports() -> None:
    last, alternatives = install.commands("cpu", Path("python"))[-1]
    assert last == "without torchaudio and torchcodec"
    assert alternatives[0][-2:] == ["torchaudio", "torchcodec"]
    assert len(install.commands("gpu", Path("python"))) == 1


def python(code: str, folder: Path, *flags: str, environment: dict[str, str] = PLAIN) -> str:
    """Return the output of a plain Python with `folder` as working directory."""
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


def test_every_python_of_an_environment_runs_the_hook_once_and_imports_nothing_heavy(
    tmp_path: Path, ran: list[str]
) -> None:
    install.install(tmp_path, "cpu")
    (pth,) = tmp_path.glob("lib/python*/site-packages/*.pth")
    assert sorted(file.name for file in pth.parent.iterdir()) == [
        f"{install.HOOK_MODULE}{end}" for end in (".pth", ".py")
    ]
    code = f"""if True:
        import site, sys
        site.addsitedir({str(pth.parent)!r})
        armed = [type(finder).__name__ for finder in sys.meta_path].count("_DeclareTorchvisionOperators")
        print(armed, bool({{"torch", "torchvision", "vlmrl"}} & set(sys.modules)))
    """
    assert python(code, tmp_path, "-S") == "1 False"  # without this environment's own packages
    # Where the folder is on PYTHONPATH too, the second of them finds the hook armed.
    both = code.replace("armed =", "import sitecustomize; armed =")
    assert python(both, tmp_path, "-S", environment=PLAIN | startup.environment()) == "1 False"


def test_a_changed_hook_is_installed_again(tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "sitecustomize.py"
    changed.write_text("# other\n")
    install.install(tmp_path / "environment", "cpu")
    monkeypatch.setattr(install, "HOOK", changed)
    ran.clear()
    install.install(tmp_path / "environment", "cpu")
    assert ran
    assert [file.read_text() for file in tmp_path.glob(f"environment/lib/*/*/{install.HOOK_MODULE}.py")] == [
        "# other\n"
    ]


def test_plain_python_imports_vision_models_in_this_environment(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if not Path(sys.prefix, ".vlmrl-setup").exists():
        pytest.skip("`make setup` did not make this environment")
    code = "from transformers import Qwen2_5_VLForConditionalGeneration as Model; print(Model.__name__)"
    assert python(code, tmp_path) == "Qwen2_5_VLForConditionalGeneration"


def test_a_python_that_is_too_old_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(install.sys, "version", "3.9.1 (main)")
    with pytest.raises(install.InstallError, match=r"Python 3\.9\.1 is not supported"):
        install.install(tmp_path, "cpu")
