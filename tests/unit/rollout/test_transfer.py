"""Buckets through shared memory: nothing lost, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from vlmrl.errors import ClusterError
from vlmrl.models.weights import digest, fingerprint, pack_bucket, unpack_bucket
from vlmrl.rollout import transfer

TENSORS = {
    "a": torch.arange(7, dtype=torch.float32),
    "b": torch.ones(2, 3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3.0),
}
WORKER = """
import json, sys
from vlmrl.models.weights import digest, fingerprint, unpack_bucket
from vlmrl.rollout.transfer import opened
bucket = opened(json.loads(sys.argv[1]))
print(fingerprint({name: digest(name, tensor) for name, tensor in unpack_bucket(bucket)}))
"""


def test_another_process_sees_the_same_tensors() -> None:
    expected = fingerprint({name: digest(name, tensor) for name, tensor in TENSORS.items()})
    with transfer.shared(pack_bucket(TENSORS.items())) as ticket:
        command = [sys.executable, "-c", WORKER, json.dumps(ticket)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == expected


def test_what_was_opened_outlives_the_sharing_and_leaves_no_segment() -> None:
    before = set(Path("/dev/shm").iterdir())
    with transfer.shared(pack_bucket(TENSORS.items())) as ticket:
        bucket = transfer.opened(ticket)
        assert set(Path("/dev/shm").iterdir()) <= before
    received = dict(unpack_bucket(bucket))
    assert all(torch.equal(received[name], tensor) for name, tensor in TENSORS.items())
    assert not Path(f"/proc/self/fd/{ticket['descriptor']}").exists()


def test_an_empty_bucket_is_a_bucket() -> None:
    with transfer.shared(pack_bucket([])) as ticket:
        assert transfer.opened(ticket).names == ()


@pytest.mark.parametrize("opens", [False, True])
def test_a_machine_without_shared_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, opens: bool) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    def full(*_: object) -> int:
        return os.open("/dev/full", os.O_RDWR)

    monkeypatch.setattr(transfer.os, "memfd_create", full if opens else refuse)
    with (
        pytest.raises(ClusterError, match=r"cannot share .* No space left on device; (free|raise)"),
        transfer.shared(pack_bucket([("a", torch.from_numpy(np.ones(3)))])),
    ):
        pass
