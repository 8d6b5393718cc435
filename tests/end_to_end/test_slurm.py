"""examples/slurm/run.sbatch on a Slurm of two machines: it is restarted when time is over and when a machine dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from recipes import recipe, steps_of
from slurm_machines import SlurmMachines, slurm_machines, why_not

import vlmrl
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig

REASON = why_not()
SCRIPT = Path(__file__).resolve().parents[2] / "examples/slurm/run.sbatch"
STEPS = 60
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm of two machines here: {REASON}"),
]


def wait_for(is_there: Callable[[], bool], machines: SlurmMachines, job: str, log: Path, limit_s: float = 150) -> None:
    end = time.monotonic() + limit_s
    while not is_there():
        text = log.read_text() if log.exists() else "no log"
        assert time.monotonic() < end, f"{machines.state(job)}\n{text[-6000:]}"
        time.sleep(0.1)


STAND_INS = {
    # The command runs on the head; the other machines do not notice its end.
    "ray": """
if ((SLURM_NODEID == 0)); then
  while [[ $1 != -- ]]; do shift; done
  shift; "$@"; exit
fi
echo "second machine $SLURMD_NODENAME" >>"$(dirname "$0")/record"
sleep 600""",
    # A run that goes on where it was saved.
    "vlmrl": """
cd "$(dirname "$0")"
echo "start $SLURM_RESTART_COUNT: $*" >>record
trap 'echo checkpoint >>record' USR1
trap 'echo saved >>record; exit 143' TERM
if [[ $SLURM_RESTART_COUNT == 1 ]]; then sleep 0.2; echo lost >>record; exit 75; fi
if [[ $SLURM_RESTART_COUNT == 2 ]]; then echo done >>record; exit 0; fi
for _ in $(seq 600); do sleep 0.1; done""",
}


def test_slurm_signals_the_command_alone_and_queues_the_job_again(tmp_path: Path) -> None:
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    record = programs / "record"

    def has(line: str) -> bool:
        return record.exists() and line in record.read_text()

    with slurm_machines() as machines:
        job = machines.submit("--nodes=2", "--time=20", f"--output={log}", str(SCRIPT), "rl", programs=programs)
        wait_for(lambda: has("start") and has("second machine two"), machines, job, log)
        machines.slurm("scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: has("checkpoint"), machines, job, log)
        machines.slurm("scancel", "--batch", "--signal=USR2", job)
        wait_for(lambda: has("done"), machines, job, log)
        wait_for(lambda: machines.state(job)["JobState"] in ENDED, machines, job, log)
        state = machines.state(job)
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2")
    lines = [line for line in record.read_text().splitlines() if not line.startswith("second")]
    wait = "rl --train.wait_nodes_s 600"
    assert lines == [
        f"start : {wait}",
        "checkpoint",
        "saved",
        f"start 1: {wait} --ckpt.load_enable",
        "lost",
        f"start 2: {wait} --ckpt.load_enable",
        "done",
    ]


def test_a_job_goes_on_after_its_time_limit_and_after_the_death_of_a_machine(
    tiny_model: Callable[..., str], tmp_path: Path, ray_session: None
) -> None:
    flags = {
        "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=56&size=1024",
        "data.max_len": 128,
        "train.batch_size": 16,
        "train.max_steps": STEPS,
        "ckpt.save_steps": 5,
        "ckpt.max_num": 2,
    }
    ranks = {"actor.num_nodes": 2, "actor.num_gpus_per_node": 1}
    model = tiny_model("qwen2_5_vl", size="micro")
    out, log = tmp_path / "run", tmp_path / "log"
    words = recipe("quickstart_sft.yaml", model, out, **flags, **ranks)

    def has_steps(count: int) -> bool:
        return (out / "metrics.jsonl").exists() and len(steps_of(out)) >= count

    with slurm_machines() as machines:
        job = machines.submit("--nodes=2", "--time=20", f"--output={log}", str(SCRIPT), "sft", *words)
        wait_for(lambda: has_steps(2), machines, job, log)
        machines.slurm("scancel", "--batch", "--signal=USR2", job)
        wait_for(lambda: machines.state(job).get("Restarts") == "1", machines, job, log)
        done = len(steps_of(out))
        wait_for(lambda: has_steps(done + 6), machines, job, log)
        raylet = next(pid for pid, line in machines.commands(1).items() if "/raylet/raylet" in line)
        os.kill(raylet, signal.SIGKILL)
        wait_for(lambda: machines.state(job).get("Restarts") == "2", machines, job, log)
        wait_for(lambda: machines.state(job)["JobState"] in ENDED, machines, job, log)
        state, text = machines.state(job), log.read_text()
        assert state["JobState"] == "COMPLETED", text[-6000:]
        assert "stopped by SIGTERM" in text
        assert "exit code 143: the job is queued again" in text
        assert "machine 10.77.0.2 died during the run, and with it actor 1: the run is stopped" in text
        assert "is complete: resume from it with --ckpt.load_enable" in text
        assert "exit code 75: the job is queued again" in text
        assert text.count("resuming after step") == 2
        # Ray prints one of its own on the machine that lost it.
        assert f'File "{Path(vlmrl.__file__).parent}' not in text
        assert not list(machines.folder.glob("vlmrl-*")), "the job's files on the machine"
    alone = tmp_path / "alone"
    two_ranks = {"actor.num_nodes": 1, "actor.num_gpus_per_node": 2}
    train_sft(load(SftConfig, recipe("quickstart_sft.yaml", model, alone, **flags, **two_ranks)))
    metrics, wanted = steps_of(out), steps_of(alone)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    for line, other in zip(metrics, wanted, strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (line["step"], name)
