"""Rendezvous of ranks, which no other process can join."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from vlmrl.learning import rendezvous
from vlmrl.system.scratch import MEETING_FILE

LIMIT = timedelta(seconds=10)


def listening() -> set[tuple[str, int]]:
    """Address and port of every socket on which this process listens."""
    connections = psutil.Process().net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_single_rank_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    before = listening()
    store = rendezvous.open_store(LIMIT)
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert listening() == before


def test_ranks_of_one_machine_meet_in_a_file_and_open_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(MEETING_FILE, str(tmp_path / "store"))
    before = listening()
    stores = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        stores.append(rendezvous.open_store(LIMIT))
    stores[0].set("a", "1")
    assert stores[1].get("a") == b"1"
    assert listening() == before
    assert rendezvous.address() == str(tmp_path / "store")


def _join(port: int) -> None:
    dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=LIMIT).set("from", "1")


def test_ranks_of_several_machines_listen_at_one_address_only(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(MEETING_FILE, raising=False)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(_join, port)
        store = rendezvous.open_store(LIMIT)
        other.result()
    assert store.get("from") == b"1"
    assert {address for address, number in listening() if number == port} == {"127.0.0.1"}
    with pytest.raises(OSError, match="Address already in use"):
        rendezvous.open_store(LIMIT)


def test_for_an_address_of_no_interface_all_interfaces_listen(port: int) -> None:
    with rendezvous.listen("192.0.2.1", port) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
