"""Check a small `vlmrl rl`: two colocated GRPO steps with images, with the checks of a run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import torch

from vlmrl.commands.self_test import models
from vlmrl.commands.self_test.outcome import Broken
from vlmrl.system.machine import GIB, free_memory

_STEPS = 2
_PHASES = ("rollout", "reward", "logprob", "update", "sync", "verify_images")
_SAMPLES_EVERY_S = 0.5


def settings(model: str, output: str, *, has_gpu: bool) -> dict[str, Any]:
    """Settings of the quickstart with fewer and shorter responses; on a GPU bf16 and sleep, as is usual there."""
    vllm: dict[str, Any] = {"cpu_kv_cache_gib": 0.25}
    if has_gpu:
        vllm = {"gpu_memory_utilization": 0.3, "enable_sleep": True}
    return {
        "actor": {"model_name_or_path": model, "adam": {"lr": 1e-4}},
        "data": {"prompt_dataset": "visual_math?families=count&difficulty=1&pixels=56&size=64", "max_len": 128},
        "reward": {"functions": {"format": 0.1, "exact": 1.0}},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 4, "max_new_tokens": 8},
        "algo": {"advantage": {"estimator": "group_norm"}},
        "train": {"batch_size": 16, "max_steps": _STEPS, "colocate_all": True},
        "vllm": vllm,
        "ds": {"param_dtype": "bf16" if has_gpu else "fp32"},
        "ckpt": {"output_dir": output},
    }


def check(folder: Path) -> str:
    """Run two steps in which engine and trainer are compared, and the image check is on."""
    model = models.build(folder)
    output, file = folder / "run", folder / "run.yaml"
    # JSON is YAML.
    file.write_text(json.dumps(settings(model, str(output), has_gpu=torch.cuda.is_available())))
    memory = _MemoryWatch()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "vlmrl", "rl", "--config", str(file)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    memory_line = memory.stop()
    sys.stdout.write(done.stdout + done.stderr)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Broken(f"the run ended with code {done.returncode}: {last[:300]}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return format_steps([line for line in lines if "policy/loss" in line]) + f"; {memory_line}"


def format_steps(steps: list[dict[str, float]]) -> str:
    """Summarize the metrics of the steps in one line. Raise Broken if some are missing."""
    if len(steps) != _STEPS:
        raise Broken(f"{len(steps)} steps of {_STEPS} are in the run's metrics")
    effects = {
        name: value
        for name, value in steps[0].items()
        if name.startswith("verify/images/") and name.endswith("_effect")
    }
    if not effects:
        raise Broken("the run did not check that its log-probs depend on the images", "--train.image_check_steps -1")
    gap = max(step["sync/logprob_diff_mean"] for step in steps)
    times = ", ".join(
        f"{phase} {steps[-1][f'time/{phase}_s']:.1f}" for phase in _PHASES if f"time/{phase}_s" in steps[-1]
    )
    return (
        f"engine and trainer differ by {gap:.1g}, images change log-probs by {min(effects.values()):.1g}; "
        f"seconds: {times}"
    )


class _MemoryWatch:
    """Watches free and pinned memory of device and host while something else runs."""

    def __init__(self) -> None:
        self._device = self._host = float("inf")
        self._pinned = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLES_EVERY_S):
            self._host = min(self._host, free_memory()[0])
            if torch.cuda.is_available():
                self._device = min(self._device, torch.cuda.mem_get_info()[0])
                self._pinned = max(self._pinned, _pinned_bytes())

    def stop(self) -> str:
        """Stop, and return a line with the peaks: GiB reserved on the device, pinned, and free when least was free."""
        self._done.set()
        self._thread.join()
        host = f"at least {self._host / GIB:.1f} GiB of main memory free"
        if self._device == float("inf"):
            return host
        total = torch.cuda.mem_get_info()[1]
        used = f"GPU: {(total - self._device) / GIB:.1f} GiB reserved, {self._device / GIB:.1f} free"
        return f"{used}; {self._pinned / GIB:.2f} GiB pinned, {host}"


def _pinned_bytes() -> int:
    """Pinned memory of this process's descendants, as far as the kernel counts it (`VmPin` and `VmLck`)."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            fields = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:  # it has ended since it was listed
            continue
        total += sum(int(line.split()[1]) * 1024 for line in fields if line.startswith(("VmPin", "VmLck")))
    return total
