"""Buckets in shared memory: equal tensors, nothing left behind, one copy."""

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
from vlmrl.models import shared_memory
from vlmrl.models.shared_memory import Outbox, Reader, open_ticket
from vlmrl.models.weight_buckets import digest, fingerprint, pack_bucket, unpack_bucket

TENSORS = {
    "a": torch.arange(7, dtype=torch.float32),
    "b": torch.ones(2, 3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3.0),
}
WORKER = """
import json, sys
from vlmrl.models.weight_buckets import digest, fingerprint, unpack_bucket
from vlmrl.models.shared_memory import open_ticket
bucket = open_ticket(json.loads(sys.argv[1]))
print(fingerprint({name: digest(name, tensor) for name, tensor in unpack_bucket(bucket)}))
"""


KILLED = """
import json, os, sys
import torch
from vlmrl.models.shared_memory import Outbox
outbox = Outbox()
ticket, _ = outbox.put([("a", torch.ones(1 << 20))])
print(json.dumps(ticket), flush=True)
os.kill(os.getpid(), 9)
"""


def named() -> set[str]:
    """Named shared memory of the machine, without that of other programs."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("vlmrl", "psm_"))}


def digests() -> dict[str, str]:
    return {name: digest(name, tensor) for name, tensor in TENSORS.items()}


def test_another_process_reads_the_same_tensors() -> None:
    ticket, sent_digests = Outbox().put(list(TENSORS.items()))
    assert sent_digests == digests()
    command = [sys.executable, "-c", WORKER, json.dumps(ticket)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == fingerprint(
        sent_digests
    )


def test_a_digest_does_not_depend_on_the_memory_layout() -> None:
    turned = torch.arange(12.0).reshape(3, 4).T
    ticket, sent_digests = Outbox().put([("turned", turned)])
    ((name, tensor),) = unpack_bucket(open_ticket(ticket))
    assert torch.equal(tensor, turned)
    assert sent_digests == {name: digest(name, turned)}


def test_an_opened_bucket_outlives_its_process_and_leaves_no_segment() -> None:
    before = named()
    outbox = Outbox()
    ticket, _ = outbox.put(list(TENSORS.items()))
    bucket = open_ticket(ticket)
    assert named() <= before
    outbox.begin()
    received = dict(unpack_bucket(bucket))
    assert all(torch.equal(received[name], tensor) for name, tensor in TENSORS.items())
    assert not Path(f"/proc/self/fd/{ticket['descriptor']}").exists()


def test_a_killed_process_leaves_nothing() -> None:
    before = named()
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False, capture_output=True, text=True)
    assert killed.returncode == -9
    assert named() <= before
    with pytest.raises(OSError, match="No such file"):
        open_ticket(json.loads(killed.stdout))


def test_only_this_user_can_open_the_memory() -> None:
    ticket, _ = Outbox().put(list(TENSORS.items()))
    assert Path(f"/proc/self/fd/{ticket['descriptor']}").stat().st_mode & 0o777 == 0o600


def test_memory_is_reused_after_its_release_and_not_before() -> None:
    outbox = Outbox()
    tickets = [outbox.put([("a", torch.full((5,), float(n)))])[0] for n in range(2)]
    assert tickets[0]["descriptor"] != tickets[1]["descriptor"]
    outbox.release(1)
    third, _ = outbox.put([("a", torch.full((4,), 2.0))])
    assert third["descriptor"] == tickets[0]["descriptor"]
    ((_, second),) = unpack_bucket(open_ticket(tickets[1]))
    assert second.tolist() == [1.0] * 5


def blocks() -> set[int]:
    """Blocks of shared memory that this process has open or mapped."""
    gc.collect()
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {path.stat().st_ino for path in links if "vlmrl-bucket" in str(path.readlink())}


def test_a_larger_bucket_replaces_a_smaller_one_and_is_freed_at_the_end() -> None:
    others = blocks()
    outbox = Outbox()
    outbox.put([("a", torch.ones(16))])
    outbox.release(1)
    ticket, _ = outbox.put([("a", torch.ones(1000))])
    assert [tensor.numel() for _, tensor in unpack_bucket(open_ticket(ticket))] == [1000]
    assert len(blocks() - others) == 1
    outbox.begin(keep_bytes=4032)
    assert len(blocks() - others) == 1
    outbox.begin(keep_bytes=4031)
    assert blocks() == others


def test_a_reader_reads_later_writes_and_unmaps_old_and_large_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "_MAX_KEPT", 4096)
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
    for n in range(shared_memory.NUM_IN_FLIGHT):
        assert read(float(n)) == [float(n)]
    outbox.begin()
    assert len(blocks() - others) == shared_memory.NUM_IN_FLIGHT
    assert read(3.0, numbers=1025) == [3.0]
    outbox.begin()
    assert len(blocks() - others) == shared_memory.NUM_IN_FLIGHT
    readers.clear()
    assert blocks() == others


def test_a_bucket_from_another_machine_is_unchanged() -> None:
    ticket = Outbox().put_bucket(pack_bucket(TENSORS.items()), 0)
    assert {name: digest(name, tensor) for name, tensor in unpack_bucket(open_ticket(ticket))} == digests()


def test_a_stale_or_wrong_ticket_changes_the_fingerprint() -> None:
    outbox = Outbox()
    ticket, sent_digests = outbox.put([("a", torch.ones(16)), ("b", torch.zeros(16))])

    def received(stale: shared_memory.Ticket) -> str:
        return fingerprint({name: digest(name, tensor) for name, tensor in unpack_bucket(open_ticket(stale))})

    assert received(ticket) == fingerprint(sent_digests)
    assert received(ticket | {"names": ["b", "a"]}) != fingerprint(sent_digests)
    outbox.release(1)
    outbox.put([("a", torch.ones(16)), ("b", torch.ones(16))])
    assert received(ticket) != fingerprint(sent_digests)


def test_an_empty_bucket_can_be_shared() -> None:
    assert open_ticket(Outbox().put([])[0]).names == ()


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_a_lack_of_memory_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    others = blocks()
    monkeypatch.setattr(shared_memory.os, call, refuse)
    with pytest.raises(ClusterError, match=r"cannot share .* No space left on device; (free|raise)"):
        Outbox().put([("a", torch.ones(3))])
    assert blocks() == others
