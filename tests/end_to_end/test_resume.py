"""Stop a run, kill it in the middle of a step, damage its newest checkpoint, and resume each time with the same
command: the metrics equal those of an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.learning.checkpoint_size import min_checkpoint_bytes
from vlmrl.system import fork_server
from vlmrl.system.atomic_folders import checkpoints
from vlmrl.system.storage import size_of

STEPS, STOPPED_IN, KILLED_IN = 8, 3, 6
GRACE_S = 60
PER_STEP = 4
RAY_AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""They end last after a kill: for up to a minute each tries to report the raylet's death to a driver that has ended."""
MEASURED_AT_A_START = {"verify/noise/level", "verify/noise/decode_gap", "verify/noise/layout_gap"}
"""Measured in a run's first step and every tenth: a resumed run measures again, because its machine may differ."""


def command(model: str, out: Path, reward: str) -> list[str]:
    """`reward`: a function that gives responses of a random model different rewards, so that it learns."""
    counting = "visual_math?families=count&difficulty=1&pixels=56&size=64"
    flags = {
        "actor.model_name_or_path": model,
        "actor.adam.lr": "1e-3",
        "data.prompt_dataset": counting,
        "data.max_len": "128",
        "reward.functions": "{}",
        "reward.remote_url": reward,
        "rollout.batch_size": str(PER_STEP),
        "rollout.n_samples_per_prompt": "4",
        "rollout.max_new_tokens": "6",
        "train.batch_size": "8",
        "train.max_steps": str(STEPS),
        "ds.param_dtype": "fp32",
        "vllm.cpu_kv_cache_gib": "0.25",
        "ckpt.save_steps": "1",
        "ckpt.max_num": "20",
        "ckpt.output_dir": str(out),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "vlmrl", "rl", *words, "--train.colocate_all"]


def read_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {record["step"]: record for record in map(json.loads, lines)}


def marked_processes(mark: str) -> list[int]:
    """Return the processes that inherited `mark`, without zombies."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                is_ours = mark.encode() in (folder / "environ").read_bytes()
                is_dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if is_ours and not is_dead:
                pids.append(int(folder.name))
    return pids


def assert_nothing_is_left(mark: str, *, within_s: float = 5.0, but: tuple[bytes, ...] = ()) -> None:
    """Check that all processes of an ended run exit within seconds: some exit only after their parent has.

    Those named in `but` may stay longer.
    """
    deadline = time.monotonic() + within_s
    while left := [title for pid in marked_processes(mark) if not (title := process_title(pid)).startswith(but)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def process_title(pid: int) -> bytes:
    """Return a process's command line; b"" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def assert_same(one: Any, other: Any, where: str) -> None:
    """Compare nested values bit by bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}/{number}")
    elif isinstance(one, int | float | str | bool | None):
        assert one == other, where


def begun(words: list[str], out: Path, log: Path, *, until: int) -> tuple[subprocess.Popen[bytes], str]:
    """Start a run and wait for step `until`; return it with the mark of its processes."""
    mark = f"VLMRL_TEST_RUN={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it,
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and those of nohup this one
    with log.open("w") as file:
        # In its own process group, as under `timeout`, and with its own fork server, whose forks show its environment.
        variables = os.environ | {name: value, fork_server.VARIABLE: ""}
        run = subprocess.Popen(words, env=variables, stdout=file, stderr=file, process_group=0)
    deadline = time.monotonic() + 240
    while until not in read_metrics(out):
        assert run.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return run, mark


def check_stop(run: subprocess.Popen[bytes], number: signal.Signals, mark: str, out: Path, log: Path) -> None:
    """Stop a run as `timeout` does, with a signal to its process group; check that no process is left."""
    began = time.monotonic()
    os.killpg(run.pid, number)
    assert run.wait(timeout=GRACE_S + 20) == (130 if number == signal.SIGINT else 143), log.read_text()[-2000:]
    assert time.monotonic() - began < GRACE_S
    assert_nothing_is_left(mark)
    done = max(read_metrics(out))
    saved = out / f"checkpoints/step_{done:06d}"
    assert (saved / "extra.json").exists()
    line = f"vlmrl rl: stopped by {number.name}: after step {done}; resume from {saved} with --ckpt.load_enable"
    assert log.read_text().splitlines()[-1] == line
    end = json.loads((out / "facts.json").read_text())["end"]
    assert (end["state"], end["reason"]) == ("stopped", line.removeprefix("vlmrl rl: "))
    assert "Traceback" not in log.read_text()
    assert not (out / "run.lock").exists()


def check_numbers(expected: dict[int, dict[str, Any]], actual: dict[int, dict[str, Any]], *, since: int) -> None:
    """Check that metrics that were equal to the bit before the first interruption still are after it."""
    names = [n for n in expected[STEPS] if not n.startswith(("time/", "throughput/")) and n not in MEASURED_AT_A_START]
    stable = [n for n in names if all(expected[s].get(n) == actual[s].get(n) for s in range(1, since))]
    assert {"reward/mean", "policy/loss", "policy/grad_norm", "sync/version"} <= set(stable)
    for step in range(since, STEPS + 1):
        assert expected[step]["policy/grad_norm"] > 0.0, "the weights do not change"
        assert {n: expected[step].get(n) for n in stable} == {n: actual[step].get(n) for n in stable}, step


@pytest.mark.timeout(600)
def test_a_stopped_and_killed_run_goes_on_with_the_numbers_of_an_unbroken_one(
    tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    model = tiny_model("qwen2_5_vl", size="micro")
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    subprocess.run(command(model, unbroken, digits_reward), check=True, timeout=240, stdout=subprocess.DEVNULL)

    in_shared_memory = shared_memory()
    log = tmp_path / "log"
    words = command(model, broken, digits_reward)
    stopped, mark = begun([*words, "--ckpt.save_steps", "100"], broken, log, until=STOPPED_IN - 1)
    check_stop(stopped, signal.SIGTERM, mark, broken, log)

    victim, mark = begun([*words, "--ckpt.load_enable"], broken, log, until=KILLED_IN - 1)
    time.sleep(0.2)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not (broken / "model").exists()

    # Large blocks go with the processes that held them. Semaphores are the trackers', which end later.
    deadline = time.monotonic() + 20
    while left := [path for path in shared_memory() - in_shared_memory if not path.name.startswith("sem.")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)

    saved = checkpoints(broken / "checkpoints")
    harmed = next(
        (saved[-1] / "deepspeed").glob("*optim_states.pt"), saved[-1] / "deepspeed/mp_rank_00_model_states.pt"
    )
    content = bytearray(harmed.read_bytes())
    content[len(content) // 2] ^= 1
    harmed.write_bytes(content)
    # The space required before the first checkpoint is at most the size of a checkpoint.
    rows = [line.split("\t")[1:] for line in (broken / "parameters.tsv").read_text().splitlines()[1:]]
    table = [("", int(trainable), int(total)) for trainable, total in rows]
    least = min_checkpoint_bytes(Model(model_name_or_path=model), Ds(param_dtype="fp32"), table)
    assert 0.7 * size_of(saved[-2]) < least <= size_of(saved[-2])

    resumed = subprocess.run([*words, "--ckpt.load_enable"], check=True, timeout=240, capture_output=True, text=True)
    output = " ".join(resumed.stdout.split())
    assert f"{saved[-1].name} is damaged: deepspeed/{harmed.name}: its checksum differs; it is" in output
    assert f"and the run resumes from {saved[-2].name}" in output
    assert "with other settings" not in output
    assert (broken / "checkpoints" / f"{saved[-1].name}.damaged").is_dir()
    first = int(saved[-1].name.removeprefix("step_"))
    assert_nothing_is_left(mark, within_s=20, but=RAY_AGENTS)
    assert not shared_memory() - in_shared_memory

    drawn = [
        json.loads(line)["index"]
        for step in range(1, STEPS + 1)
        for line in (broken / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
    ]
    assert sorted(drawn) == list(range(STEPS * PER_STEP)), "a prompt was lost or repeated"

    expected, actual = read_metrics(unbroken), read_metrics(broken)
    assert sorted(actual) == sorted(expected)
    assert actual[first].keys() >= MEASURED_AT_A_START
    check_numbers(expected, actual, since=STOPPED_IN)

    last = f"checkpoints/step_{STEPS:06d}"
    files = sorted(path.relative_to(unbroken) for path in (unbroken / last).rglob("*.pt"))
    assert files
    for file in files:
        one, other = (torch.load(root / file, map_location="cpu", weights_only=False) for root in (unbroken, broken))
        assert_same(one, other, str(file))


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_whatever_a_run_is_doing_when_it_is_stopped_it_goes_on_with_the_same_numbers(
    tmp_path: Path, tiny_model: Callable[..., str], digits_reward: str
) -> None:
    model = tiny_model("qwen2_5_vl", size="micro")
    unbroken = tmp_path / "unbroken"
    subprocess.run(command(model, unbroken, digits_reward), check=True, timeout=240, stdout=subprocess.DEVNULL)
    step_s = read_metrics(unbroken)[STEPS]["time/step_s"]
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in range(9):
        out, log = tmp_path / f"broken-{number}", tmp_path / "log"
        words = [*command(model, out, digits_reward), "--ckpt.save_steps", "100"]
        run, mark = begun(words, out, log, until=STOPPED_IN - 1)
        time.sleep(step_s * number / 9)
        check_stop(run, signals[number % 3], mark, out, log)
        subprocess.run([*words, "--ckpt.load_enable"], check=True, timeout=240, stdout=subprocess.DEVNULL)
        actual = read_metrics(out)
        assert sorted(actual) == list(range(1, STEPS + 1))
        check_numbers(read_metrics(unbroken), actual, since=STOPPED_IN)
