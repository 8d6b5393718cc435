"""Check that every rank gets its visible device, and that collectives between ranks are correct.

One process per visible GPU over NCCL, or two processes over gloo on CPU:

    python -P -m vlmrl.commands.self_test.ranks RANK WORLD_SIZE MEETING_FILE

The last line of a rank's output is JSON: the UUID of its device, and seconds of an all-reduce.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from vlmrl.cluster.session import local_session, worker_environment
from vlmrl.commands.self_test.outcome import Broken

_NUMBERS = 1 << 20
"""4 MiB of fp32."""
_TIMEOUT_S = 60


def rank(number: int, count: int, meeting: str) -> dict[str, Any]:
    """Reduce, gather and broadcast with the other ranks; return the device's UUID and seconds of an all-reduce.

    Raises AssertionError when a result is wrong.
    """
    has_gpu = torch.cuda.is_available()
    where = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        # A file: a TCP store would listen on every interface of the machine.
        store=FileStore(meeting, count),
        rank=number,
        world_size=count,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    numbers = torch.full((_NUMBERS,), float(number + 1), device=where)
    dist.all_reduce(numbers)
    assert bool((numbers == count * (count + 1) / 2).all()), "the sum over ranks is wrong"
    gathered = [torch.zeros(1, device=where) for _ in range(count)]
    dist.all_gather(gathered, torch.tensor([float(number)], device=where))
    assert [int(each) for each in gathered] == list(range(count)), "the gathered values are not in the order of ranks"
    value = torch.tensor([number + 7.0], device=where)
    dist.broadcast(value, src=0)
    assert float(value) == 7.0, "the value that rank 0 broadcast did not arrive"
    started = time.monotonic()
    for _ in range(5):
        dist.all_reduce(numbers)
    float(numbers[0])  # waits for the device
    seconds = (time.monotonic() - started) / 5
    uuid = str(torch.cuda.get_device_properties(0).uuid) if has_gpu else ""
    dist.barrier()
    dist.destroy_process_group()
    return {"uuid": uuid, "seconds": seconds}


def _start(number: int, count: int, meeting: Path, variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "vlmrl.commands.self_test.ranks", str(number), str(count), str(meeting)],
            env=os.environ | variables | {"PYTHONPATH": os.environ["PYTHONPATH"]},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def check(folder: Path) -> str:
    """Start one process per visible GPU, in the environment that a run gives it."""
    machines = local_session()
    has_gpu = machines.has_gpus
    count = machines.slots[0] if has_gpu else 2
    visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)] if has_gpu else [""] * count
    environments = [worker_environment(machines, num_workers=count, slots=[i], node=0) for i in range(count)]
    logs = [folder / f"rank_{i}.txt" for i in range(count)]
    ranks = [
        _start(number, count, folder / "meeting", variables, log)
        for number, (variables, log) in enumerate(zip(environments, logs, strict=True))
    ]
    try:
        codes = [process.wait(2 * _TIMEOUT_S) for process in ranks]
    except subprocess.TimeoutExpired:
        waiting = [number for number, process in enumerate(ranks) if process.poll() is None]
        raise Broken(
            f"rank {waiting[0]} of {count} has not finished after {2 * _TIMEOUT_S} s: collectives or the driver hang"
        ) from None
    finally:
        # A rank that hangs would go on to occupy its device.
        for process in ranks:
            process.kill()
            process.wait()
    lines = [(log.read_text().strip().splitlines() or ["no output"])[-1] for log in logs]
    failed = [i for i, code in enumerate(codes) if code]
    if failed:
        raise Broken(f"rank {failed[0]} of {count} ended with code {codes[failed[0]]}: {lines[failed[0]][:200]}")
    results = [json.loads(line) for line in lines]
    if [result["uuid"] for result in results] != visible:
        uuids = ", ".join(result["uuid"] for result in results)
        raise Broken(
            f"the ranks have the devices {uuids}, visible are {', '.join(visible)}",
            "CUDA_VISIBLE_DEVICES unset, or 0,1,... in order",
        )
    seconds = max(result["seconds"] for result in results)
    backend = "NCCL" if has_gpu else "gloo"
    return f"{count} ranks over {backend}, {_NUMBERS * 4 / seconds / 2**30:.2f} GiB/s of all-reduce"


if __name__ == "__main__":
    number, count, meeting = sys.argv[1:]
    sys.stdout.write(json.dumps(rank(int(number), int(count), meeting)) + "\n")
