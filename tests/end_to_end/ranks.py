"""Start the ranks of test_learning*.py, and read their results."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.system import fork_server

RANK = Path(__file__).with_name("learning_rank.py")


def python() -> str:
    """Python as the tests' fork server provides it, which has imported everything already."""
    return os.environ.get(fork_server.VARIABLE, sys.executable)


def end_together() -> None:
    """End all ranks together without shutting the interpreter down, during which a rank may abort once its peers have
    ended. All results are written. In a run, Ray ends ranks in the same way."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


class Ranks:
    """Runs tasks on a number of ranks and reads their results."""

    def __init__(self, folder: Path, script: Path = RANK, *, skipped: Collection[str] = ()) -> None:
        """`skipped` are names of tasks that are not run."""
        self.folder = folder
        self._skipped = skipped
        self._script = script
        self._tasks: list[dict[str, Any]] = []

    def add(self, name: str, do: str, **arguments: Any) -> None:
        if name not in self._skipped:
            self._tasks.append({"do": do, "out": str(self.folder / name), "arguments": arguments})

    def run(self, count: int) -> None:
        job = self.folder / "job.json"
        job.write_text(json.dumps(self._tasks))
        self._tasks = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [python(), str(self._script), str(job)],
                env=os.environ | shared | {"RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for r in range(count)
        ]
        texts = [rank.communicate(timeout=600)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * count, texts[0][-3000:]

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / f"{name}.npz"))

    def json(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())

    def assert_close(self, name: str, other: str, tolerance: float = 1e-6) -> None:
        one, two = self.tensors(name), self.tensors(other)
        assert one.keys() == two.keys()
        worst = max((float(np.abs(one[k] - two[k]).max()), k) for k in one)
        assert worst[0] < tolerance, f"{name} is not {other}: {worst}"
