"""`vlmrl doctor`: report what is installed, what works on this machine, and how to fix what does not.

Every library is tested in its own process: one that crashes, hangs or is the wrong build costs a line of the report,
not the report.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import vlmrl
from vlmrl import startup
from vlmrl.startup.driver import has_gpu, shows_gpu
from vlmrl.startup.pins import Version, versions
from vlmrl.system import machine
from vlmrl.system.machine import GIB, Finding

INSTALL = "run `make setup`, or `pip install 'vlmrl[cpu]'` (`vlmrl[gpu]` where there is a GPU)"


class ProbeError(Exception):
    """A failed probe: the message, and optionally a fix that takes the place of its check's."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    probe: str
    """`module:function`, which returns a detail for the report, or raises."""
    fix: str
    essential: bool = True
    """The exit code is 1 when it fails: nothing trains without it."""
    isolated: bool = True
    """Run in a separate process, because it imports heavy libraries."""


# --- probes of libraries: each runs in a separate process -----------------------------------------------------------


def torch_works() -> str:
    import torch

    finding = machine.devices()
    if not finding.ok:
        raise ProbeError(finding.detail, finding.fix)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ones = torch.ones(64, 64, device=device)
    if float((ones @ ones).sum()) != 64**3:
        raise ProbeError(f"a matrix product on {device} is wrong")
    if device == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        devices.append(f"{torch.cuda.get_device_name(index)} ({free / GIB:.0f} of {total / GIB:.0f} GiB free)")
    return f"cuda {torch.version.cuda}: " + ", ".join(devices)


def torchvision_works() -> str:
    import torch
    from torchvision.transforms.v2 import functional

    smaller = functional.resize(torch.zeros(3, 8, 8, dtype=torch.uint8), [4, 4])
    return f"transforms resize an image to {smaller.shape[-1]}x{smaller.shape[-2]}"


def transformers_works() -> str:
    # A torchaudio that was built for another torch breaks these two imports.
    from peft import LoraConfig
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    return f"imports {AutoProcessor.__name__}, {Qwen2_5_VLForConditionalGeneration.__name__}, {LoraConfig.__name__}"


def vllm_works() -> str:
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    platform, expected = current_platform.device_type or "unknown", "cuda" if has_gpu() else "cpu"
    if platform != expected:
        raise ProbeError(f"platform {platform}, not {expected}", f"not the vllm for this machine: {INSTALL}")
    current_platform.import_kernels()
    return f"platform {platform}, {AsyncLLM.__name__} imports"


def deepspeed_works() -> str:
    import deepspeed  # noqa: F401 - importing it is half of the test
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    backend = f"{accelerator.device_name()} over {accelerator.communication_backend_name()}"
    expected = "cuda over nccl" if shows_gpu() else "cpu over gloo"
    if backend != expected:
        raise ProbeError(f"{backend}, not {expected}", "unset DS_ACCELERATOR, or correct it")
    return backend


def ray_works() -> str:
    import ray

    return f"ray {ray.__version__} imports"


def bitsandbytes_works() -> str:
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from bitsandbytes.optim import AdamW8bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    error = (dequantize_4bit(*quantize_4bit(weight, quant_type="nf4")) - weight).abs().mean() / weight.abs().mean()
    # Rounding normal numbers to the 16 levels of NF4 costs 9 % of their size.
    if not error < 0.15:
        raise ProbeError(f"NF4 on {device} is off by {error:.0%}")
    detail = f"NF4 round trip on {device} is off by {error:.0%}"
    if device == "cpu":
        return f"{detail}; its optimizers need CUDA"
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = torch.ones_like(weight)
    AdamW8bit([parameter], lr=0.5, weight_decay=0.0).step()
    # The length of Adam's first step is the learning rate.
    if not torch.allclose(weight - parameter, torch.full_like(weight, 0.5), rtol=0.05):
        raise ProbeError("a step of its 8-bit Adam is wrong")
    has_plugin = importlib.util.find_spec("vllm_bnb_plugin") is not None
    plugin = "is installed" if has_plugin else "is missing, for vllm.qlora_base bitsandbytes"
    return f"{detail}; 8-bit Adam works; vllm-bnb-plugin {plugin}"


def reward_servers_work() -> str:
    """Libraries of `vlmrl serve-rm` and `reward.remote_url http://...`."""
    import fastapi
    import httpx
    import uvicorn

    return f"fastapi {fastapi.__version__}, uvicorn {uvicorn.__version__}, httpx {httpx.__version__}"


def _probe(function: Callable[[], str]) -> str:
    return f"vlmrl.commands.doctor:{function.__name__}"


TORCHAUDIO = f"`pip uninstall torchaudio torchcodec` where torch is the CPU build; else {INSTALL}"
CHECKS: tuple[Check | Callable[[], Finding], ...] = (
    *machine.CHECKS,
    Check("vllm", _probe(vllm_works), INSTALL),
    Check("torch", _probe(torch_works), INSTALL),
    Check("transformers, peft", _probe(transformers_works), TORCHAUDIO),
    Check("torchvision", _probe(torchvision_works), INSTALL),
    Check("deepspeed", _probe(deepspeed_works), INSTALL),
    Check("ray", _probe(ray_works), INSTALL),
    Check("bitsandbytes", _probe(bitsandbytes_works), f"only 4-bit models need it; {INSTALL}", essential=False),
    Check("reward servers", _probe(reward_servers_work), f"only rewards over HTTP need it; {INSTALL}", essential=False),
)


# --- running checks ------------------------------------------------------------------------------------------------


def run_check(check: Check | Callable[[], Finding], *, timeout_s: float = 180.0) -> Finding:
    """Run one check, in a separate process if it is isolated. Never raises."""
    if not isinstance(check, Check):
        return machine.run_check(check)
    if check.isolated:
        return _run_isolated(check, timeout_s)
    try:
        return Finding(check.name, ok=True, essential=check.essential, detail=_resolve(check.probe)())
    except Exception as error:  # a probe may raise anything: that is its result
        return Finding(check.name, ok=False, essential=check.essential, **_explain(error, check.fix))


def run_probe(probe: str) -> None:
    """Run a probe in the process of an isolated check, and print the result as a last line of JSON."""
    try:
        line: dict[str, Any] = {"ok": True, "detail": _resolve(probe)()}
    except Exception as error:  # a probe may raise anything: that is its result
        line = {"ok": False, **_explain(error, "")}
    sys.stdout.write("\n" + json.dumps(line) + "\n")


def _run_isolated(check: Check, timeout_s: float) -> Finding:
    def failed(detail: str, fix: str = "") -> Finding:
        return Finding(check.name, ok=False, essential=check.essential, detail=detail, fix=fix or check.fix)

    code = f"from vlmrl.commands.doctor import run_probe; run_probe({check.probe!r})"
    env = os.environ | startup.environment()
    env["PYTHONPATH"] += f"{os.pathsep}{Path(vlmrl.__file__).parents[1]}"
    try:
        # -P: a folder called `ray` in the working directory is not Ray.
        child = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=env,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return failed(f"no result within {timeout_s:.0f} s")
    try:
        result = json.loads(child.stdout.strip().splitlines()[-1])
        ok, detail = bool(result["ok"]), str(result["detail"])
    except (IndexError, ValueError, KeyError, TypeError):  # it died before it printed its result
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        return failed(f"its process ended with code {child.returncode}: {_shorten(last)}")
    if not ok:
        return failed(detail, result["fix"])
    return Finding(check.name, ok=True, essential=check.essential, detail=detail)


def _resolve(probe: str) -> Callable[[], str]:
    module, function = probe.split(":")
    resolved: Callable[[], str] = getattr(importlib.import_module(module), function)
    return resolved


def _explain(error: Exception, fix: str) -> dict[str, str]:
    if isinstance(error, ProbeError):
        return {"detail": str(error.args[0]), "fix": error.args[1] if len(error.args) > 1 else fix}
    if isinstance(error, ModuleNotFoundError):
        return {"detail": f"{error.name} is not installed", "fix": fix}
    if isinstance(error, OSError) and error.errno:
        return {"detail": f"{errno.errorcode.get(error.errno, error.errno)}: {error.strerror}", "fix": fix}
    return {"detail": _shorten(f"{type(error).__name__}: {error}"), "fix": fix}


def _shorten(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


# --- the report ----------------------------------------------------------------------------------------------------


def run_checks(checks: Sequence[Check | Callable[[], Finding]] = CHECKS) -> list[Finding]:
    """Run all checks, a few at a time; return the findings in order."""
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(run_check, checks))


def main(as_json: bool = False, *, checks: Sequence[Check | Callable[[], Finding]] = CHECKS) -> int:
    """Print the report. Return 1 if an essential check failed, else 0."""
    try:
        installed = versions("gpu" if has_gpu() else "cpu")
    except metadata.PackageNotFoundError:
        # vlmrl is imported from a folder and was never installed: the checks still work.
        installed = []
    findings = run_checks(checks)
    healthy = all(finding.ok or not finding.essential for finding in findings)
    if as_json:
        report = {
            "ok": healthy,
            "vlmrl": vlmrl.__version__,
            "python": platform.python_version(),
            "device": "gpu" if has_gpu() else "cpu",
            "cores": len(os.sched_getaffinity(0)),
            "versions": [asdict(version) for version in installed],
            "checks": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        _print_report(installed, findings, healthy)
    return 0 if healthy else 1


def _print_report(installed: Sequence[Version], findings: Sequence[Finding], healthy: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    hardware = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {'NVIDIA GPU' if has_gpu() else 'no GPU'}"
    console.print(f"[bold]vlmrl {vlmrl.__version__}[/bold] on Python {platform.python_version()}, {hardware}")
    table = Table("package", "installed", "wanted", box=None, header_style="bold", pad_edge=False)
    for version in installed:
        style = "" if version.ok else "red"
        table.add_row(version.package, version.installed or "missing", version.wanted, style=style)
    console.print(table, "")
    table = Table("", "check", "result", box=None, header_style="bold", pad_edge=False)
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]FAIL[/]" if finding.essential else "[yellow]warn[/]"
        detail = escape(finding.detail) + ("" if finding.ok else f"\n[bold]fix:[/bold] {escape(finding.fix)}")
        table.add_row(mark, finding.name, detail)
    console.print(table, "")
    ready = "[green]Ready.[/green] Next: [bold]make quickstart[/bold], or [bold]vlmrl rl --help[/bold]"
    console.print(ready if healthy else "[red]Not ready:[/red] see the lines marked FAIL.")


if __name__ == "__main__":
    sys.exit(main("--json" in sys.argv[1:]))
