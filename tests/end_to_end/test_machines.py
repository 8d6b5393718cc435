"""Runs over two machines: same metrics as on one machine, early rejection of mismatches, and death of a machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from recipes import recipe, steps_of
from two_machines import ADDRESSES, TwoMachines, two_machines, why_not

import vlmrl
from vlmrl.commands.rl import train_rl
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig

STEPS, KEPT = 3, 2
REASON = why_not()
TOKEN = {"VLMRL_RM_TOKEN": "s3cret"}
# A driver that runs several commands, so that the stack is imported once.
DRIVER = """
import json, sys
from vlmrl.cli import main
for line in sys.stdin:
    print("done", main(json.loads(line)), flush=True)
"""
# Process names of a run; some processes rename themselves.
OURS = ("_Worker", "VLLM", "vllm", "multiprocessing")

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"one machine cannot be made two here: {REASON}")


class Driver:
    """A process on a machine that executes command lines."""

    def __init__(self, machines: TwoMachines, machine: int) -> None:
        words = [sys.executable, "-c", DRIVER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = machines.popen(machine, words, env=TOKEN, text=True, **pipes)

    def run(self, *words: str) -> tuple[int, str]:
        """Run `vlmrl` with these words; return its exit code and output."""
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            if line.startswith("done "):
                return int(line.split()[1]), "".join(lines)
            lines.append(line)
        raise RuntimeError("".join(lines))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    with two_machines() as both:
        yield both


@pytest.fixture(scope="module")
def driver(machines: TwoMachines) -> Iterator[Driver]:
    """A driver on the first machine."""
    driver = Driver(machines, 0)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def words(tiny_model: Callable[..., str], digits_reward: str) -> Callable[..., list[str]]:
    """The command line of a short run with images on two ranks of ZeRO-3 and two engines."""

    def build(out: Path, **flags: Any) -> list[str]:
        common = {
            "actor.num_nodes": 2,
            "actor.num_gpus_per_node": 1,
            "actor.adam.lr": 3e-3,
            "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=56&size=64",
            "data.max_len": 128,
            "ds.zero_stage": 3,
            "vllm.num_engines": 2,
            "vllm.cpu_kv_cache_gib": 0.25,
            "reward.functions": "{}",
            "reward.remote_url": digits_reward,
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 4,
            "train.batch_size": 16,
            "train.max_steps": STEPS,
            "ckpt.save_steps": KEPT,
            "ckpt.max_num": 9,
            "eval.max_samples": 4,
            "eval.steps": -1,
        }
        return recipe("visual_math_tiny.yaml", tiny_model("qwen2_5_vl", size="micro"), out, **(common | flags))

    return build


@pytest.fixture(scope="module")
def alone(
    words: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory, ray_session: None
) -> list[dict[str, Any]]:
    """Metrics of the same run on one machine."""
    out = tmp_path_factory.mktemp("alone") / "run"
    train_rl(load(RlConfig, words(out, **{"actor.num_nodes": 1, "actor.num_gpus_per_node": 2})))
    return steps_of(out)


@pytest.fixture(scope="module")
def server(machines: TwoMachines, digits_reward: str) -> Iterator[str]:
    """URL of a server of the same reward on the second machine."""
    serve = ["serve-rm", "--reward.remote_url", digits_reward, "--serve.host", ADDRESSES[1], "--serve.port", "0"]
    pipe = subprocess.PIPE
    process = machines.popen(1, [sys.executable, "-m", "vlmrl", *serve], env=TOKEN, stdout=pipe, text=True)
    yield process.stdout.readline().rpartition(" ")[2].strip()
    process.terminate()
    assert process.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def spread(
    machines: TwoMachines,
    driver: Driver,
    words: Callable[..., list[str]],
    server: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, str]:
    """Folder and output of the run over two machines."""
    out = tmp_path_factory.mktemp("spread") / "run"
    before, running = machines.shared_memory(1), machines.commands(1).keys()
    code, output = driver.run("rl", *words(out, **{"reward.remote_url": server}))
    assert code == 0, output
    assert machines.shared_memory(1) <= before
    assert not left_by_a_run(machines, 1, running)
    return out, output


def left_by_a_run(machines: TwoMachines, machine: int, running: Collection[int]) -> list[str]:
    """Return commands of the run's processes that still exist ten seconds after its end. Those in `running` existed
    before it."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        commands = [line for pid, line in machines.commands(machine).items() if pid not in running]
        left = [line for line in commands if any(name in line for name in OURS)]
        if not left:
            return []
        time.sleep(0.2)
    return left


def test_a_run_over_two_machines_has_the_numbers_of_one(spread: tuple[Path, str], alone: list[dict[str, Any]]) -> None:
    out, output = spread
    lines = [line.split() for line in output.splitlines()]
    assert any("actor" in line and "0:0" in line and "1:0" in line for line in lines), output
    assert any("vllm" in line and "0:0" in line and "1:0" in line for line in lines), output
    assert_same_numbers(steps_of(out), alone)


def assert_same_numbers(metrics: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in metrics] == [line["step"] for line in wanted]
    for line, other in zip(metrics, wanted, strict=True):
        for name in ("reward/mean", "reward/std", "policy/loss", "policy/grad_norm", "response/tokens_mean"):
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (line["step"], name)
        assert line["media/bytes_moved"] == other["media/bytes_moved"] > 0
        assert line["vision/tower_calls"] == other["vision/tower_calls"] > 0
        assert line["sync/version"] == other["sync/version"]
        assert line["sync/bytes"] == other["sync/bytes"] > 0
        assert max(line["sync/logprob_diff_max"], other["sync/logprob_diff_max"]) < 1e-4


def test_a_machine_that_lacks_what_the_run_needs_is_named_before_anything_starts(
    machines: TwoMachines,
    driver: Driver,
    words: Callable[..., list[str]],
    tiny_model: Callable[..., str],
    tmp_path: Path,
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    with machines.covered(1, hidden):
        code, output = driver.run("rl", *words(hidden / "run"))
    assert (code, output.count("\n")) == (2, 1), output
    assert f"ckpt.output_dir {hidden}/run: machine 10.77.0.2 does not see what is written there" in output

    model = tiny_model("qwen2_5_vl", size="micro")
    with machines.covered(1, Path(model)):  # the folder is there and empty, as where nothing was mounted
        code, output = driver.run("rl", *words(tmp_path / "run"))
    assert (code, output.count("\n")) == (2, 1), output
    assert f"actor.model_name_or_path: machine 10.77.0.2 does not see {model}" in output

    held = metadata.version("torch").partition("+")[0]
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.1\n")
    installed = Path(str(metadata.distribution("torch").locate_file(f"torch-{metadata.version('torch')}.dist-info")))
    with machines.covered(1, installed / "METADATA", tmp_path / "METADATA"):
        code, output = driver.run("rl", *words(tmp_path / "run"))
    assert (code, output.count("\n")) == (2, 1), output
    assert f"machine 10.77.0.2 has torch 2.12.1, machine 10.77.0.1 has torch {held}" in output

    (tmp_path / "errors.py").write_text('"""Another checkout."""\n')
    with machines.covered(1, Path(vlmrl.__file__).parent / "startup" / "pins.py", tmp_path / "errors.py"):
        code, output = driver.run("rl", *words(tmp_path / "run"))
    assert (code, output.count("\n")) == (2, 1), output
    assert output.count(f"has vlmrl {vlmrl.__version__} (code ") == 2
    assert not (tmp_path / "run/config.yaml").exists()


def newest(out: Path) -> Path:
    """Return the newest complete checkpoint of a run."""
    return max(path for path in (out / "checkpoints").glob("step_*") if path.name[5:].isdigit())


@pytest.mark.prove
def test_a_run_starts_when_the_machine_that_it_needs_has_joined(
    words: Callable[..., list[str]], tmp_path: Path
) -> None:
    flags = {"train.max_steps": 1}
    command = [sys.executable, "-m", "vlmrl", "rl", *words(tmp_path / "run", **flags)]
    log = tmp_path / "log"
    with two_machines(joins=False) as machines:
        code, output = machines.run(0, [*command, "--train.wait_nodes_s", "3"])
        assert code == 75, output
        assert "the machines of the run have not joined within train.wait_nodes_s 3" in output.splitlines()[-1]
        assert "a role requires 2 nodes, and 1 have joined: 10.77.0.1 (1 CPU core)" in output.splitlines()[-1]
        command += ["--train.wait_nodes_s", "120"]
        with log.open("w") as file, machines.popen(0, command, stdout=file, stderr=file) as run:
            end = time.monotonic() + 90
            while "waiting up to 120 s for more machines" not in log.read_text():
                assert run.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < end
                time.sleep(0.1)
            machines.join()
            assert run.wait(timeout=200) == 0, log.read_text()[-3000:]
    assert len(steps_of(tmp_path / "run")) == 1


@pytest.mark.prove
def test_a_checkpoint_goes_on_where_the_machines_have_changed_places(
    spread: tuple[Path, str], words: Callable[..., list[str]]
) -> None:
    out, _ = spread
    unbroken = steps_of(out)
    for step in range(KEPT + 1, STEPS + 1):
        shutil.rmtree(out / f"checkpoints/step_{step:06d}", ignore_errors=True)
    shutil.rmtree(out / "model")
    command = [sys.executable, "-m", "vlmrl", "rl", *words(out), "--ckpt.load_enable"]
    with two_machines(head=1) as swapped:
        code, output = swapped.run(1, command)
    assert code == 0, output
    assert f"resuming after step {KEPT}" in output
    assert_same_numbers(steps_of(out), unbroken)
    assert (out / "model/config.json").exists()


@pytest.mark.prove
@pytest.mark.parametrize("death", ["killed", "cut off"])
def test_a_machine_that_dies_in_a_step_ends_the_run_in_one_line_and_the_other_goes_on(
    death: str, words: Callable[..., list[str]], tmp_path: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    with two_machines() as machines:
        before, running = machines.shared_memory(0), machines.commands(0).keys()
        flags = {"train.max_steps": 12, "ckpt.save_steps": 1}
        command = [sys.executable, "-m", "vlmrl", "rl", *words(out, **flags)]
        with log.open("w") as file, machines.popen(0, command, stdout=file, stderr=file) as run:
            end = time.monotonic() + 200
            while not (out / "metrics.jsonl").exists() or len(steps_of(out)) < 2:
                assert run.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < end
                time.sleep(0.05)
            time.sleep(0.3)
            if death == "killed":
                machines.kill(1)
            else:
                machines.cut(1)
            died = time.monotonic()
            try:
                assert run.wait(timeout=60) == 75, log.read_text()[-3000:]
            finally:
                run.kill()
            print(f"the run ended {time.monotonic() - died:.1f} s after the machine was {death}")
        output = log.read_text().splitlines()
        assert "Traceback" not in log.read_text()
        assert "machine 10.77.0.2 died during the run, and with it actor 1 and vllm 1" in output[-1], output[-1]
        assert output[-1].endswith(f"{newest(out)} is complete: resume from it with --ckpt.load_enable"), output[-1]
        assert not left_by_a_run(machines, 0, running)
        if death == "cut off":
            return
        assert machines.shared_memory(0) <= before

        done = len(steps_of(out))
        left = words(out, **(flags | {"actor.num_nodes": 1, "actor.num_gpus_per_node": 2, "train.max_steps": done + 2}))
        resumed = [sys.executable, "-m", "vlmrl", "rl", *left, "--ckpt.load_enable"]
        code, output = machines.run(0, resumed, env={"RAY_ADDRESS": ""})
        assert code == 0, output
        assert [line["step"] for line in steps_of(out)] == list(range(1, done + 3))
