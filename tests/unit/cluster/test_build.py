"""What becomes of roles that are still starting when everything ends."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from vlmrl.cluster.build import Stage
from vlmrl.cluster.session import Session
from vlmrl.parallel import run_parallel


def test_a_role_that_starts_while_everything_ends_is_ended_at_once() -> None:
    ended: list[str] = []
    with ExitStack() as stack:
        stage = Stage(Session(()), {}, stack)
        with stage.ending():
            stage._at_end(lambda: ended.append("engine"))
        stage._at_end(lambda: ended.append("actor"))
        assert ended == ["actor"], "its thread had not heard of the end"
    assert ended[-1] == "engine"


def test_the_stage_ends_when_nothing_waits_for_its_roles_any_more() -> None:
    is_ended, done = threading.Event(), []

    def wait() -> None:
        is_ended.wait(30)  # a call to a role that is killed
        done.append("waited")

    def run() -> None:
        with ExitStack() as stack:
            stage = Stage(Session(()), {}, stack)
            with stage.ending():
                stage._at_end(is_ended.set)
                run_parallel(wait, fail)

    def fail() -> None:
        raise ValueError("too few rows")

    with pytest.raises(ValueError, match="too few rows"):
        run()
    assert done == ["waited"]
