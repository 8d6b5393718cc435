"""An incompatible vLLM is reported in one line; the installed one is compatible."""

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
    format_missing,
    missing,
    missing_in,
    missing_in_worker,
)


def test_the_installed_vllm_lacks_nothing_and_the_check_is_fast() -> None:
    pytest.importorskip("vllm.v1.engine.async_llm")
    missing(FRONT_END)
    started = time.process_time()
    absent = missing(FRONT_END)
    assert time.process_time() - started < 0.1
    assert absent + missing(RELOAD) + missing(ADAPTER) == []


@pytest.mark.parametrize(
    ("file", "class_name", "required"),
    [
        # Both model runners for GPUs: read as text, because this machine may not be able to import them.
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner", RUNNER),
        ("v1/worker/gpu/model_runner.py", "GPUModelRunner", RUNNER),
        ("distributed/weight_transfer/base.py", "WeightTransferEngine", TRANSFER),
    ],
)
def test_the_sources_for_gpus_define_the_required_names(
    file: str, class_name: str, required: dict[str, tuple[str, ...]]
) -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    (body,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    methods = {node.name for node in body.body if isinstance(node, ast.FunctionDef)}
    attributes = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert required.keys() <= methods | attributes


class Engine:
    def pause(self, *, mode: str = "abort") -> None: ...

    def anything(self, **more: Any) -> None: ...


def test_names_that_a_newer_vllm_has_dropped_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("newer_vllm")
    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "newer_vllm", module)
    required = {
        "newer_vllm:Engine.pause": ("mode", "clear_cache"),
        "newer_vllm:Engine.resume": (),
        "newer_vllm:Engine.anything": ("goes",),
        "newer_vllm.gone:Engine": (),
    }
    assert missing(required) == ["Engine.pause(clear_cache)", "Engine.resume", "Engine"]
    line = format_missing(missing(required), on_gpu=True)
    assert "lacks Engine.pause(clear_cache), Engine.resume, Engine: install the version that" in line
    assert line.endswith("or set VLLM_USE_V2_MODEL_RUNNER=0 for its older model runner")
    assert "V2" not in format_missing(["a", "b", "c", "d"], on_gpu=False)
    assert "a, b, c and 1 more" in format_missing(["a", "b", "c", "d"], on_gpu=False)


def test_a_worker_with_an_incompatible_model_runner_is_reported() -> None:
    pytest.importorskip("vllm.v1.engine.async_llm")
    runner = SimpleNamespace(get_model=lambda: None, device="cuda:0", reset_encoder_cache=lambda: None)
    worker = SimpleNamespace(model_runner=runner, weight_transfer_engine=SimpleNamespace(shutdown=lambda: None))
    assert missing_in_worker(worker, has_adapter=False, transfers=False) == []
    assert missing_in_worker(worker, has_adapter=True, transfers=False) == ["a LoRA manager"]
    absent = missing_in_worker(worker, has_adapter=False, transfers=True)
    assert "SimpleNamespace.update_weights" in absent
    del runner.get_model
    assert missing_in(runner, RUNNER) == ["SimpleNamespace.get_model"]
