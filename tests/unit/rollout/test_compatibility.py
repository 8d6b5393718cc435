"""A vLLM that lacks what vlmrl relies on is told in one line; the installed one lacks nothing."""

from __future__ import annotations

import ast
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vlmrl.rollout.compatibility import (
    ADAPTER,
    FRONT_END,
    RELOAD,
    RUNNER,
    TRANSFER,
    line,
    missing,
    missing_in,
    missing_in_worker,
)


def test_the_installed_vllm_lacks_nothing_and_asking_is_quick() -> None:
    pytest.importorskip("vllm.v1.engine.async_llm")
    missing(FRONT_END)
    started = time.process_time()
    lacks = missing(FRONT_END)
    assert time.process_time() - started < 0.1
    assert lacks + missing(RELOAD) + missing(ADAPTER) == []


@pytest.mark.parametrize(
    ("file", "kind", "needs"),
    [
        # Of both model runners on GPUs, which this machine may not be able to import.
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner", RUNNER),
        ("v1/worker/gpu/model_runner.py", "GPUModelRunner", RUNNER),
        ("distributed/weight_transfer/base.py", "WeightTransferEngine", TRANSFER),
    ],
)
def test_the_sources_for_gpus_have_what_their_workers_are_asked_for(
    file: str, kind: str, needs: dict[str, tuple[str, ...]]
) -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse((Path(found.origin).parent / file).read_text())
    (body,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
    methods = {node.name for node in body.body if isinstance(node, ast.FunctionDef)}
    set_on_self = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert needs.keys() <= methods | set_on_self


class Engine:
    def pause(self, *, mode: str = "abort") -> None: ...

    def anything(self, **more: Any) -> None: ...


def test_what_a_new_vllm_has_dropped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("newer_vllm")
    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "newer_vllm", module)
    needs = {
        "newer_vllm:Engine.pause": ("mode", "clear_cache"),
        "newer_vllm:Engine.resume": (),
        "newer_vllm:Engine.anything": ("goes",),
        "newer_vllm.gone:Engine": (),
    }
    assert missing(needs) == ["Engine.pause(clear_cache)", "Engine.resume", "Engine"]
    said = line(missing(needs), on_gpu=True)
    assert "lacks Engine.pause(clear_cache), Engine.resume, Engine: install the vLLM that" in said
    assert said.endswith("or set VLLM_USE_V2_MODEL_RUNNER=0 for its older model runner")
    assert "V2" not in line(["a", "b", "c", "d"], on_gpu=False)
    assert "a, b, c and 1 more" in line(["a", "b", "c", "d"], on_gpu=False)


def test_a_worker_with_another_model_runner_is_refused_as_it_is() -> None:
    pytest.importorskip("vllm.v1.engine.async_llm")
    runner = SimpleNamespace(get_model=lambda: None, device="cuda:0", reset_encoder_cache=lambda: None)
    worker = SimpleNamespace(model_runner=runner, weight_transfer_engine=SimpleNamespace(shutdown=lambda: None))
    assert missing_in_worker(worker, has_adapter=False, transfers=False) == []
    assert missing_in_worker(worker, has_adapter=True, transfers=False) == ["a LoRA manager"]
    lacks = missing_in_worker(worker, has_adapter=False, transfers=True)
    assert "SimpleNamespace.update_weights" in lacks
    del runner.get_model
    assert missing_in(runner, RUNNER) == ["SimpleNamespace.get_model"]
