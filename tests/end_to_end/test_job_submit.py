"""`ray job submit` on a Ray that this environment starts: logs, exit codes, a stop that saves, and what is uploaded."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from recipes import recipe, steps_of

from vlmrl.system import fork_server

BIN = Path(sys.executable).parent
KEPT = 2

pytestmark = pytest.mark.prove


class Cluster(NamedTuple):
    """A Ray head on this machine."""

    address: str
    """URL for `ray job`."""
    environment: Mapping[str, str]

    def job(self, *words: str, timeout_s: float = 150) -> tuple[int, str]:
        """Run `ray job`; return its exit code and output."""
        verb, *rest = words
        command = [str(BIN / "ray"), "job", verb, "--address", self.address, *rest]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="vj", dir="/tmp"))
    ports = free_ports(2)
    dropped = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", fork_server.VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
    }
    where = [f"--port={ports[0]}", f"--dashboard-port={ports[1]}", "--node-ip-address=127.0.0.1"]
    room = ["--num-cpus=2", "--object-store-memory=300000000", f"--temp-dir={folder}"]
    with (folder / "log").open("wb") as log:
        words = [str(BIN / "ray"), "start", "--head", "--block", *where, *room]
        head = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        cluster = Cluster(f"http://127.0.0.1:{ports[1]}", environment)
        end = time.monotonic() + 90
        while cluster.job("list")[0] != 0:
            assert head.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, (folder / "log").read_text()
            time.sleep(1)
        yield cluster
    finally:
        # Not `ray stop`, which ends every Ray of this user on the machine.
        family = psutil.Process(head.pid).children(recursive=True)
        head.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            head.wait(timeout=20)
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        head.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def test_a_job_shows_its_log_ends_with_its_status_and_is_saved_when_it_is_stopped(
    cluster: Cluster, tiny_model: Callable[..., str], tmp_path: Path
) -> None:
    model = tiny_model("qwen2_5_vl", size="micro")
    flags = {
        "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=56&size=2048",
        "data.max_len": 128,
        "train.batch_size": 16,
        "train.max_steps": KEPT,
        "ckpt.save_steps": KEPT,
    }
    out = tmp_path / "run"
    command = ["vlmrl", "sft", *recipe("quickstart_sft.yaml", model, out, **flags)]
    code, output = cluster.job("submit", "--submission-id", "short", "--", *command)
    assert code == 0, output
    assert "succeeded" in output
    assert "placement" in output, "the log of the run"
    assert len(steps_of(out)) == KEPT

    code, output = cluster.job("submit", "--submission-id", "refused", "--", *command)
    assert code == 1, output
    assert f"vlmrl sft: ckpt.output_dir {out} holds another run: resume it with --ckpt.load_enable" in output
    assert "exit code 2" in output

    words = ["--train.max_steps", "100", "--ckpt.load_enable"]
    code, output = cluster.job("submit", "--no-wait", "--submission-id", "long", "--", *command, *words)
    assert code == 0, output
    end = time.monotonic() + 120
    while len(steps_of(out)) < KEPT + 2:
        assert time.monotonic() < end, cluster.job("logs", "long")[1]
        time.sleep(0.1)
    code, output = cluster.job("stop", "long")
    assert code == 0, output
    log = cluster.job("logs", "long")[1]
    assert "vlmrl sft: stopped by SIGTERM" in log, log
    done = len(steps_of(out))
    assert (out / f"checkpoints/step_{done:06d}").is_dir()
    assert [line["step"] for line in steps_of(out)] == list(range(1, done + 1))


def test_the_upload_of_a_working_folder_leaves_out_what_gitignore_names(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    for name in ("run.yaml", "runs/secret.yaml", ".env", ".venv/file"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n")
    shutil.copy(Path(__file__).resolve().parents[2] / ".gitignore", folder)
    code, output = cluster.job("submit", "--working-dir", str(folder), "--", "find", ".", "-type", "f")
    assert code == 0, output
    shown = {line for line in output.splitlines() if line.startswith("./")}
    assert shown == {"./run.yaml", "./.gitignore"}
