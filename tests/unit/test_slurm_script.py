"""examples/slurm/run.sbatch with stand-ins for Slurm's and Ray's programs: its signals, exit codes and restarts.

tests/end_to_end/test_slurm.py runs it with the real ones.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/slurm/run.sbatch"
STAND_INS = {
    "hostname": 'echo "$ADDRESSES"',
    # One machine: the step's options are dropped.
    "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 SLURM_STEP_ID=0 SLURM_CPUS_ON_NODE=4 exec "$@"',
    "scontrol": 'echo "scontrol $*" >>"$RECORD"; kill "$PPID"',
    "scancel": 'echo "scancel $*" >>"$RECORD"',
    "ray": 'echo "ray $*" >>"$RECORD"; while [[ $1 != -- ]]; do shift; done; shift; "$@"',
    # A run that is saved on SIGTERM.
    "vlmrl": """echo "vlmrl $*" >>"$RECORD"
echo "at $RAY_ADDRESS with a token of ${#RAY_AUTH_TOKEN} characters" >>"$RECORD"
trap 'echo checkpoint >>"$RECORD"' USR1
trap 'echo saved >>"$RECORD"; exit 143' TERM
for _ in $(seq "$STEPS"); do sleep 0.05; done
exit "$ENDS_WITH\"""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a job whose programs are stand-ins."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "RECORD": str(tmp_path / "record"),
        "VLMRL_BIN": str(programs),
        "VLMRL_TMP": str(tmp_path),
        "ADDRESSES": "10.0.0.7 172.17.0.1",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "1",
        "STEPS": "0",
        "ENDS_WITH": "0",
    }


def start(environment: Mapping[str, str], *words: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(SCRIPT), *words], env={**environment, **changes}, stderr=subprocess.PIPE, text=True
    )


def record(environment: Mapping[str, str]) -> list[str]:
    path = Path(environment["RECORD"])
    return path.read_text().splitlines() if path.exists() else []


def wait_for(line: str, environment: Mapping[str, str]) -> None:
    end = time.monotonic() + 10
    while not any(line in recorded for recorded in record(environment)):
        assert time.monotonic() < end, record(environment)
        time.sleep(0.02)


def test_its_syntax_is_right() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; the syntax is right")
    subprocess.run(["shellcheck", str(SCRIPT)], check=True)


def test_the_command_runs_on_the_head_with_the_address_that_others_reach(environment: dict[str, str]) -> None:
    assert start(environment, "rl", "--config", "a b.yaml").wait(20) == 0
    ray, vlmrl, joined, end = record(environment)
    assert ray.startswith("ray symmetric-run --address 10.0.0.7:23456 --num-cpus=4 --temp-dir=")
    assert vlmrl == "vlmrl rl --train.wait_nodes_s 600 --config a b.yaml"
    assert joined == "at 10.0.0.7:23456 with a token of 64 characters"
    assert end == "scancel --signal=TERM 123456.0", "the other machines"
    assert not list(Path(environment["VLMRL_TMP"]).glob("vlmrl-*"))


def test_a_ray_that_does_not_start_is_an_error(environment: dict[str, str]) -> None:
    (Path(environment["VLMRL_BIN"]) / "ray").write_text("#!/usr/bin/env bash\nexit 0\n")
    job = start(environment, "rl")
    assert "run.sbatch: Ray did not start" in job.communicate(timeout=20)[1]
    assert job.returncode == 1


@pytest.mark.parametrize("code", ["1", "2"])
def test_an_error_of_the_command_ends_the_job_with_its_exit_code(environment: dict[str, str], code: str) -> None:
    assert start(environment, "rl", ENDS_WITH=code).wait(20) == int(code)
    assert not [line for line in record(environment) if line.startswith("scontrol")]


def test_a_run_that_is_out_of_time_is_saved_and_queued_again(environment: dict[str, str]) -> None:
    job = start(environment, "rl", STEPS="400")
    wait_for("at 10.0.0.7", environment)
    job.send_signal(signal.SIGUSR1)
    wait_for("checkpoint", environment)
    job.send_signal(signal.SIGUSR2)
    job.wait(20)
    assert [line for line in record(environment)[-3:] if "scancel" not in line] == ["saved", "scontrol requeue 123456"]
    assert start(environment, "rl", SLURM_RESTART_COUNT="1").wait(20) == 0
    assert "vlmrl rl --train.wait_nodes_s 600 --ckpt.load_enable" in record(environment)


def test_a_stopped_run_is_saved_and_not_queued_again(environment: dict[str, str]) -> None:
    job = start(environment, "rl", STEPS="400")
    wait_for("at 10.0.0.7", environment)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 143
    assert record(environment)[-2] == "saved"
    assert not [line for line in record(environment) if line.startswith("scontrol")]


def test_a_run_that_lost_a_machine_is_queued_again_within_limits(environment: dict[str, str]) -> None:
    start(environment, "rl", ENDS_WITH="75").wait(20)
    assert record(environment)[-1] == "scontrol requeue 123456"
    last = start(environment, "rl", ENDS_WITH="75", SLURM_RESTART_COUNT="3", VLMRL_MAX_RESTARTS="3")
    assert last.wait(20) == 75
    assert not record(environment)[-1].startswith("scontrol")


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_verbs_without_checkpoints_are_restarted_as_they_are(environment: dict[str, str], verb: str) -> None:
    assert start(environment, verb, SLURM_RESTART_COUNT="1").wait(20) == 0
    assert f"vlmrl {verb} --train.wait_nodes_s 600" in record(environment)


@pytest.mark.parametrize(("verb", "waits"), [("eval", True), ("generate", True), ("doctor", False), ("bench", False)])
def test_only_runs_wait_for_machines(environment: dict[str, str], verb: str, waits: bool) -> None:
    assert start(environment, verb, "--help").wait(20) == 0
    flags = "--train.wait_nodes_s 600 --help" if waits else "--help"
    assert f"vlmrl {verb} {flags}" in record(environment)


def test_what_is_missing_is_named(environment: dict[str, str]) -> None:
    for words, changes, line in (
        ([], {}, "give a vlmrl command"),
        (["rl"], {"VLMRL_BIN": "/nowhere"}, "there is no vlmrl in /nowhere"),
        (["rl"], {"ADDRESSES": ""}, "set VLMRL_HEAD_ADDRESS"),
        (["rl"], {"SLURM_JOB_ID": ""}, "start it with sbatch"),
    ):
        job = start(environment, *words, **changes)
        assert line in job.communicate(timeout=20)[1]
        assert job.returncode == 2
