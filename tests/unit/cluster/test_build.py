"""Roles that are still starting when the run ends."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.session import Session
from vlmrl.parallel import run_parallel


def test_a_role_that_starts_after_the_end_is_stopped_at_once() -> None:
    stopped: list[str] = []
    with ExitStack() as stack:
        builder = RoleBuilder(Session(()), {}, stack)
        with builder.running():
            builder._stop_at_end(lambda: stopped.append("engine"))
        builder._stop_at_end(lambda: stopped.append("actor"))
        assert stopped == ["actor"], "its thread was still starting it"
    assert stopped[-1] == "engine"


def test_the_builder_closes_when_no_thread_waits_for_its_roles_any_more() -> None:
    is_stopped, done = threading.Event(), []

    def wait() -> None:
        is_stopped.wait(30)  # a call to a role that is killed
        done.append("waited")

    def run() -> None:
        with ExitStack() as stack:
            builder = RoleBuilder(Session(()), {}, stack)
            with builder.running():
                builder._stop_at_end(is_stopped.set)
                run_parallel(wait, fail)

    def fail() -> None:
        raise ValueError("too few rows")

    with pytest.raises(ValueError, match="too few rows"):
        run()
    assert done == ["waited"]
