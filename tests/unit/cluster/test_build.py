"""The order in which roles start, and roles that are still starting when the run ends."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.session import Node, Session
from vlmrl.config.load import load
from vlmrl.config.verbs import EvalConfig
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


@pytest.mark.parametrize("flags", ["", "--train.colocate_all --vllm.enable_sleep"])
def test_an_evaluation_starts_engines_before_models_that_share_their_gpus(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would count memory that they take meanwhile as its own."""
    started: list[str] = []
    engines_started = threading.Event()

    def start_engines(*_: Any, **__: Any) -> str:
        if not flags:
            engines_started.wait(0.2)
        started.append("engines")
        engines_started.set()
        return "engines"

    def start_models(*_: Any) -> dict[str, Any]:
        started.append("models")
        return {}

    monkeypatch.setattr(RoleBuilder, "engines", start_engines)
    monkeypatch.setattr(RoleBuilder, "rewarder", lambda *_: None)
    monkeypatch.setattr(RoleBuilder, "_reward_models", start_models)
    needed = "--actor.model_name_or_path m --eval.dataset d --reward.model_name_or_path j"
    config = load(EvalConfig, f"{needed} {flags}".split())
    report: Any = type("Report", (), {"say": print})
    unused: Any = None
    with ExitStack() as stack:
        builder = RoleBuilder(Session((Node(id="", num_cpus=2, num_gpus=1),)), {}, stack)
        engines: Any = builder.evaluation_roles(config, unused, report)[0]
    assert engines == "engines"
    assert started == (["engines", "models"] if flags else ["models", "engines"])
