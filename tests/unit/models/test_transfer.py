"""Buckets in shared memory: nothing lost, nothing left, copied once."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from vlmrl.errors import ClusterError
from vlmrl.models import transfer
from vlmrl.models.transfer import Outbox, Reader, opened
from vlmrl.models.weights import digest, fingerprint, pack_bucket, unpack_bucket

TENSORS = {
    "a": torch.arange(7, dtype=torch.float32),
    "b": torch.ones(2, 3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3.0),
}
WORKER = """
import json, sys
from vlmrl.models.weights import digest, fingerprint, unpack_bucket
from vlmrl.models.transfer import opened
bucket = opened(json.loads(sys.argv[1]))
print(fingerprint({name: digest(name, tensor) for name, tensor in unpack_bucket(bucket)}))
"""


KILLED = """
import json, os, sys
import torch
from vlmrl.models.transfer import Outbox
outbox = Outbox()
ticket, _ = outbox.put([("a", torch.ones(1 << 20))])
print(json.dumps(ticket), flush=True)
os.kill(os.getpid(), 9)
"""


def named() -> set[str]:
    """Shared memory with a name; other programs of the machine have some that come and go."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("vlmrl", "psm_"))}


def digests() -> dict[str, str]:
    return {name: digest(name, tensor) for name, tensor in TENSORS.items()}


def test_another_process_sees_the_same_tensors() -> None:
    ticket, told = Outbox().put(list(TENSORS.items()))
    assert told == digests()
    command = [sys.executable, "-c", WORKER, json.dumps(ticket)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == fingerprint(told)


def test_a_digest_is_of_the_numbers_whatever_the_layout_of_the_tensor() -> None:
    turned = torch.arange(12.0).reshape(3, 4).T
    ticket, told = Outbox().put([("turned", turned)])
    ((name, tensor),) = unpack_bucket(opened(ticket))
    assert torch.equal(tensor, turned)
    assert told == {name: digest(name, turned)}


def test_what_was_opened_outlives_its_process_and_leaves_no_segment() -> None:
    before = named()
    outbox = Outbox()
    ticket, _ = outbox.put(list(TENSORS.items()))
    bucket = opened(ticket)
    assert named() <= before
    outbox.begin()
    received = dict(unpack_bucket(bucket))
    assert all(torch.equal(received[name], tensor) for name, tensor in TENSORS.items())
    assert not Path(f"/proc/self/fd/{ticket['descriptor']}").exists()


def test_a_process_that_is_killed_leaves_nothing() -> None:
    before = named()
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False, capture_output=True, text=True)
    assert killed.returncode == -9
    assert named() <= before
    with pytest.raises(OSError, match="No such file"):
        opened(json.loads(killed.stdout))


def test_the_memory_is_for_this_user_alone() -> None:
    ticket, _ = Outbox().put(list(TENSORS.items()))
    assert Path(f"/proc/self/fd/{ticket['descriptor']}").stat().st_mode & 0o777 == 0o600


def test_memory_is_used_again_once_it_is_released_and_not_before() -> None:
    outbox = Outbox()
    tickets = [outbox.put([("a", torch.full((5,), float(n)))])[0] for n in range(2)]
    assert tickets[0]["descriptor"] != tickets[1]["descriptor"]
    outbox.release(1)
    third, _ = outbox.put([("a", torch.full((4,), 2.0))])
    assert third["descriptor"] == tickets[0]["descriptor"]
    ((_, second),) = unpack_bucket(opened(tickets[1]))
    assert second.tolist() == [1.0] * 5


def blocks() -> set[int]:
    """Blocks of shared memory that this process holds open or mapped."""
    gc.collect()
    found = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {path.stat().st_ino for path in found if "vlmrl-bucket" in str(path.readlink())}


def test_a_larger_bucket_takes_the_place_of_a_smaller_one_and_is_given_back_at_the_end() -> None:
    others = blocks()
    outbox = Outbox()
    outbox.put([("a", torch.ones(16))])
    outbox.release(1)
    ticket, _ = outbox.put([("a", torch.ones(1000))])
    assert [tensor.numel() for _, tensor in unpack_bucket(opened(ticket))] == [1000]
    assert len(blocks() - others) == 1
    outbox.begin(keep_bytes=4032)
    assert len(blocks() - others) == 1
    outbox.begin(keep_bytes=4031)
    assert blocks() == others


def test_a_reader_sees_what_is_written_later_and_lets_go_of_what_is_old_or_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "_MOST_KEPT", 4096)
    others = blocks()
    outbox, readers = Outbox(), [Reader()]

    def read(value: float, numbers: int = 8) -> list[float]:
        ticket, _ = outbox.put([("a", torch.full((numbers,), value))])
        ((_, tensor),) = unpack_bucket(readers[0].open(ticket))
        return sorted(set(tensor.tolist()))

    assert read(1.0) == [1.0]
    outbox.begin(keep_bytes=64)
    # In the same memory, which the reader has mapped.
    assert read(2.0) == [2.0]
    assert len(blocks() - others) == 1
    for n in range(transfer.NUM_UNDER_WAY):
        assert read(float(n)) == [float(n)]
    outbox.begin()
    assert len(blocks() - others) == transfer.NUM_UNDER_WAY
    assert read(3.0, numbers=1025) == [3.0]
    outbox.begin()
    assert len(blocks() - others) == transfer.NUM_UNDER_WAY
    readers.clear()
    assert blocks() == others


def test_what_came_from_another_machine_is_the_same_bucket() -> None:
    ticket = Outbox().put_bucket(pack_bucket(TENSORS.items()), 0)
    assert {name: digest(name, tensor) for name, tensor in unpack_bucket(opened(ticket))} == digests()


def test_a_ticket_that_is_stale_or_of_something_else_shows_in_the_fingerprint() -> None:
    outbox = Outbox()
    ticket, told = outbox.put([("a", torch.ones(16)), ("b", torch.zeros(16))])

    def received(stale: transfer.Ticket) -> str:
        return fingerprint({name: digest(name, tensor) for name, tensor in unpack_bucket(opened(stale))})

    assert received(ticket) == fingerprint(told)
    assert received(ticket | {"names": ["b", "a"]}) != fingerprint(told)
    outbox.release(1)
    outbox.put([("a", torch.ones(16)), ("b", torch.ones(16))])
    assert received(ticket) != fingerprint(told)


def test_an_empty_bucket_is_a_bucket() -> None:
    assert opened(Outbox().put([])[0]).names == ()


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_a_machine_without_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    others = blocks()
    monkeypatch.setattr(transfer.os, call, refuse)
    with pytest.raises(ClusterError, match=r"cannot share .* No space left on device; (free|raise)"):
        Outbox().put([("a", torch.ones(3))])
    assert blocks() == others
