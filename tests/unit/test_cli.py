"""The command line as a user sees it."""

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vlmrl import __version__, cli
from vlmrl.errors import ClusterError, MachineError

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, dict[str, Any]]]:
    """Replace the modules that do the work by records of their calls."""
    result: list[tuple[str, Any, dict[str, Any]]] = []

    def recorder(name: str) -> Any:
        def record(config: Any = None, **options: Any) -> int:
            result.append((name, config, options))
            return 0

        return record

    for module, names in {
        "vlmrl.commands.rl": ("train_rl",),
        "vlmrl.commands.sft": ("train_sft",),
        "vlmrl.commands.rm": ("train_rm",),
        "vlmrl.commands.dpo": ("train_dpo",),
        "vlmrl.commands.evaluate": ("evaluate",),
        "vlmrl.commands.bench.engines": ("sync", "rollout", "agents"),
        "vlmrl.commands.bench.asynchrony": ("asynchrony",),
        "vlmrl.commands.bench.step": ("step",),
        "vlmrl.commands.bench.logprobs": ("logprobs",),
        "vlmrl.commands.merge": ("merge",),
        "vlmrl.commands.report": ("report",),
        "vlmrl.commands.serve_reward": ("serve_rm",),
        "vlmrl.commands.memory": ("show",),
    }.items():
        fake = ModuleType(module)
        for name in names:
            setattr(fake, name, recorder(name))
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr("vlmrl.commands.doctor.main", recorder("doctor"))
    monkeypatch.setattr("vlmrl.commands.self_test.report.main", recorder("selftest"))
    return result


@pytest.mark.parametrize(
    ("argv", "called", "options"),
    [
        (["rl", *NEEDED], "train_rl", {"dry_run": False, "is_quiet": False}),
        (["rl", *NEEDED, "--dry-run", "--train.seed", "1"], "train_rl", {"dry_run": True, "is_quiet": False}),
        (["sft", "--dry-run", *NEEDED], "train_sft", {"dry_run": True, "is_quiet": False}),
        (["rm", *NEEDED], "train_rm", {"dry_run": False, "is_quiet": False}),
        (["rm", *NEEDED, "--quiet"], "train_rm", {"dry_run": False, "is_quiet": True}),
        (["dpo", "--dry-run", *NEEDED], "train_dpo", {"dry_run": True, "is_quiet": False}),
        (
            ["eval", "--actor.model_name_or_path", "m", "--eval.dataset", "d"],
            "evaluate",
            {"dry_run": False, "is_quiet": False},
        ),
        (["bench", "sync", "--actor.model_name_or_path", "m"], "sync", {}),
        (["bench", "rollout", *NEEDED], "rollout", {}),
        (["bench", "agents", "--actor.model_name_or_path", "m"], "agents", {}),
        (["bench", "async", "--actor.model_name_or_path", "m"], "asynchrony", {}),
        (["bench", "step", "--actor.model_name_or_path", "m"], "step", {}),
        (["bench", "logprobs", "--bench.tokens", "8"], "logprobs", {}),
        (["merge", "--merge.adapter", "a", "--merge.output", "b"], "merge", {}),
        (["serve-rm", "--reward.model_name_or_path", "m"], "serve_rm", {}),
        (["report", "a", "b", "--serve"], "report", {}),
        (["doctor"], "doctor", {"as_json": False}),
        (["doctor", "--json"], "doctor", {"as_json": True}),
        (["doctor", "--self-test"], "selftest", {"as_json": False}),
        (["doctor", "--json", "--self-test"], "selftest", {"as_json": True}),
    ],
)
def test_a_verb_calls_its_function(calls: list[Any], argv: list[str], called: str, options: dict[str, Any]) -> None:
    assert cli.main(argv) == 0
    ((name, config, given),) = calls
    assert (name, given) == (called, options)
    if called == "report":
        assert (config.report.runs, config.report.serve) == (("a", "b"), True)
    elif called not in ("doctor", "selftest", "logprobs", "merge", "serve_rm"):
        assert config.actor.model_name_or_path == "m"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["zzz"],
            "vlmrl: no such verb: zzz; there are rl, sft, rm, dpo, eval, generate, bench, report, serve, serve-rm,",
        ),
        (
            ["train"],
            "vlmrl: no verb is called train here: vlmrl rl learns from rewards, vlmrl sft from responses, vlmrl dpo",
        ),
        (["grpo", *NEEDED], "vlmrl: no verb is called grpo here: vlmrl rl does it, with --algo.advantage.estimator gr"),
        (["ppo"], "vlmrl: no verb is called ppo here: vlmrl rl does it, with --algo.advantage.estimator gae\n"),
        (["rl", "--vllm_num_engines", "2", *NEEDED], "vlmrl rl: --vllm_num_engines: is --vllm.num_engines here\n"),
        (["evall"], "vlmrl: no such verb: evall; did you mean eval?\n"),
        (["bench", "snyc"], "vlmrl bench: no such benchmark: snyc; did you mean sync?\n"),
        (
            ["doctor", "--fix"],
            "vlmrl doctor: takes --json, --self-test, and --config FILE.yaml with other settings of the run, not --fix",
        ),
        (["rl", *NEEDED, "--train.sed", "1"], "vlmrl rl: --train.sed: no such setting; did you mean --train.seed?\n"),
        (["bench", "sync", *NEEDED[:2], "--dry-run"], "vlmrl bench: --dry-run: no such setting, and none like it; "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], message: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert calls == []


@pytest.mark.parametrize(
    ("text", "verb"),
    [
        ("rollout: {max_new_tokens: 8}", "rl"),
        ("train: {colocate_all: false}", "rl"),
        ("train: {batch_size: 8}", "sft"),
        ("data: {output_key: message}", "sft"),
        ("rm: {kind: process}", "rm"),
        ("dpo: {beta: 0.2}", "dpo"),
        ("{data: {chosen_key: good}, ref: {num_nodes: 1}}", "dpo"),
        ("{data: {chosen_key: good}, rm: {loss_type: logexp}}", "rm"),
    ],
)
def test_doctor_recognises_the_verb_of_a_file(calls: list[Any], text: str, verb: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert cli.main(["doctor", "--config", str(file), *NEEDED, "--ds.zero_stage", "3", "--json"]) == 0
    ((name, config, given),) = calls
    assert (name, config.verb, config.ds.zero_stage, given) == ("show", verb, 3, {"as_json": True})


def test_a_mistake_in_a_planned_runs_settings_is_reported(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--config", "none.yaml", *NEEDED]) == 2
    assert capsys.readouterr().err.startswith("vlmrl doctor: --config none.yaml: cannot be read")
    assert calls == []


def test_several_mistakes_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rl", "--train.seed", "x"]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "vlmrl rl: 3 mistakes in the settings"
    assert [line.split()[0] for line in rest] == ["--actor.model_name_or_path", "--data.prompt_dataset", "--train.seed"]


def test_an_error_of_the_run_is_one_line_too(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any, **how: Any) -> None:
        raise ClusterError("vllm requires 8 GPUs, and there are 2: lower --vllm.num_engines")

    monkeypatch.setattr(sys.modules["vlmrl.commands.rl"], "train_rl", fail)
    assert cli.main(["rl", *NEEDED]) == 2
    assert capsys.readouterr().err == "vlmrl rl: vllm requires 8 GPUs, and there are 2: lower --vllm.num_engines\n"


def test_a_machine_that_is_gone_is_exit_code_75_for_schedulers_to_try_again(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any, **how: Any) -> None:
        raise MachineError("machine 10.0.0.2 died during the run")

    monkeypatch.setattr(sys.modules["vlmrl.commands.rl"], "train_rl", fail)
    assert cli.main(["rl", *NEEDED]) == 75
    assert capsys.readouterr().err == "vlmrl rl: machine 10.0.0.2 died during the run\n"


def test_an_interrupt_is_exit_code_130(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(config: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["vlmrl.commands.rl"], "train_rl", interrupt)
    assert cli.main(["rl", *NEEDED]) == 130
    assert capsys.readouterr().err == "vlmrl: interrupted\n"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--help"],
        ["-h"],
        ["rl", "--help"],
        ["sft", "-h"],
        ["eval", "--help"],
        ["bench"],
        ["doctor", "-h"],
        ["merge", "-h"],
    ],
)
def test_help_needs_no_settings(argv: list[str], calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: vlmrl")
    assert calls == []


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vlmrl", *argv], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("argv", [["--help"], ["rl", "--help"]])
def test_help_takes_less_than_a_second(argv: list[str]) -> None:
    def seconds() -> float:
        started = time.perf_counter()
        assert run(*argv).returncode == 0
        return time.perf_counter() - started

    # The fastest of three, because other programs may use the machine.
    assert min(seconds() for _ in range(3)) < 1.0


def test_the_module_runs_and_gives_the_exit_code() -> None:
    done = run("rl", "--nothing", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_the_program_ends_without_unloading_its_modules() -> None:
    code = """
import sys
from vlmrl.cli import main

class Unloaded:
    def __del__(self):
        print("unloaded")

kept = Unloaded()
sys.argv = ["vlmrl", "--version"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")


def test_an_unknown_flag_is_reported_without_heavy_imports() -> None:
    code = """
import sys
import vlmrl.cli
assert vlmrl.cli.main(["rl", "--learning_rate", "1e-5", "--num-generations", "8", "--zzz", "1"]) == 2
heavy = {"torch", "ray", "vllm", "transformers", "deepspeed", "datasets", "numpy", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_verbs_of_other_libraries_lead_to_ours() -> None:
    assert not cli._ELSEWHERE.keys() & cli._VERBS.keys()
    for message in cli._ELSEWHERE.values():
        assert message.split()[1] in cli._VERBS


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m vlmrl rl --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: vlmrl rl")
    assert done.stderr == ""


def test_parsing_imports_nothing_heavy() -> None:
    code = """
import sys
import vlmrl.cli
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
load(RlConfig, ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"])
assert vlmrl.cli.main(["rl", "--help"]) == 0
heavy = {"torch", "ray", "vllm", "transformers", "deepspeed", "datasets", "numpy", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_exit_code_is_the_same_when_nobody_reads_the_last_line() -> None:
    code = "import sys; from vlmrl.cli import main; sys.stdin.readline(); sys.exit(main(['nonsense']))"
    run = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=subprocess.STDOUT)
    assert run.stdin is not None
    assert run.stdout is not None
    run.stdout.close()
    run.stdin.close()
    assert run.wait(60) == 2
