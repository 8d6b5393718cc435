"""`vlmrl doctor`: what is installed, what works here, and how to mend what does not.

Every library is asked in a process of its own: one that crashes, hangs or is of the wrong build costs one line of the
report, never the report.
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
    """Something does not work. The second argument says how to mend it, when the probe knows better than its check."""


@dataclass(frozen=True, slots=True)
class Check:
    """One question of the report."""

    name: str
    probe: str
    """`module:function`; it returns what it found, or raises."""
    mend: str
    essential: bool = True
    """Without it nothing trains: the exit code is 1 when it fails."""
    isolated: bool = True
    """Ask in a process of its own, because heavy libraries take part."""


# --- what the libraries do: each of these runs in a process of its own ----------------------------------------------


def torch_works() -> str:
    import torch

    seen = machine.devices()
    if not seen.ok:
        raise ProbeError(seen.detail, seen.mend)
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
    # These are the two imports that a torchaudio built for another torch takes down.
    from peft import LoraConfig
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    return f"imports {AutoProcessor.__name__}, {Qwen2_5_VLForConditionalGeneration.__name__}, {LoraConfig.__name__}"


def vllm_works() -> str:
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    found, wanted = current_platform.device_type or "unknown", "cuda" if has_gpu() else "cpu"
    if found != wanted:
        raise ProbeError(f"platform {found}, not {wanted}", f"not the vllm for this machine: {INSTALL}")
    current_platform.import_kernels()
    return f"platform {found}, {AsyncLLM.__name__} imports"


def deepspeed_works() -> str:
    import deepspeed  # noqa: F401 - importing it is half of the test
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    found = f"{accelerator.device_name()} over {accelerator.communication_backend_name()}"
    wanted = "cuda over nccl" if shows_gpu() else "cpu over gloo"
    if found != wanted:
        raise ProbeError(f"{found}, not {wanted}", "unset DS_ACCELERATOR, or correct it")
    return found


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
    found = f"NF4 to and fro on {device}, off by {error:.0%}"
    if device == "cpu":
        return f"{found}; its optimizers need CUDA"
    moved = torch.nn.Parameter(weight.clone())
    moved.grad = torch.ones_like(weight)
    AdamW8bit([moved], lr=0.5, weight_decay=0.0).step()
    # Adam's first step is as long as its learning rate.
    if not torch.allclose(weight - moved, torch.full_like(weight, 0.5), rtol=0.05):
        raise ProbeError("a step of its 8-bit Adam is wrong")
    plugin = "is there" if importlib.util.find_spec("vllm_bnb_plugin") else "is not, for vllm.qlora_base bitsandbytes"
    return f"{found}; 8-bit Adam steps; vllm-bnb-plugin {plugin}"


def reward_servers_work() -> str:
    """What `vlmrl serve-rm` and `reward.remote_url http://...` speak with."""
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


# --- asking --------------------------------------------------------------------------------------------------------


def ask(check: Check | Callable[[], Finding], *, timeout_s: float = 180.0) -> Finding:
    """Run one check, wherever it has to run. Never raises."""
    if not isinstance(check, Check):
        return machine.look(check)
    if check.isolated:
        return _ask_elsewhere(check, timeout_s)
    try:
        return Finding(check.name, ok=True, essential=check.essential, detail=_resolve(check.probe)())
    # Whatever a probe meets is its answer.
    except Exception as error:
        return Finding(check.name, ok=False, essential=check.essential, **_explain(error, check.mend))


def answer(probe: str) -> None:
    """The other side of an isolated check: run the probe and print its answer as the last line, as JSON."""
    try:
        line: dict[str, Any] = {"ok": True, "detail": _resolve(probe)()}
    # Whatever a probe meets is its answer.
    except Exception as error:
        line = {"ok": False, **_explain(error, "")}
    sys.stdout.write("\n" + json.dumps(line) + "\n")


def _ask_elsewhere(check: Check, timeout_s: float) -> Finding:
    def failed(detail: str, mend: str = "") -> Finding:
        return Finding(check.name, ok=False, essential=check.essential, detail=detail, mend=mend or check.mend)

    code = f"from vlmrl.commands.doctor import answer; answer({check.probe!r})"
    env = os.environ | startup.environment()
    env["PYTHONPATH"] += f"{os.pathsep}{Path(vlmrl.__file__).parents[1]}"
    try:
        # -P: a folder called `ray` where the user happens to stand is not Ray.
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
        return failed(f"no answer within {timeout_s:.0f} s")
    try:
        said = json.loads(child.stdout.strip().splitlines()[-1])
        ok, detail = bool(said["ok"]), str(said["detail"])
    # It died before it could answer, and what it printed is not JSON of ours.
    except (IndexError, ValueError, KeyError, TypeError):
        last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return failed(f"its process ended with code {child.returncode}: {_shorten(last)}")
    return (
        Finding(check.name, ok=True, essential=check.essential, detail=detail) if ok else failed(detail, said["mend"])
    )


def _resolve(probe: str) -> Callable[[], str]:
    module, function = probe.split(":")
    found: Callable[[], str] = getattr(importlib.import_module(module), function)
    return found


def _explain(error: Exception, mend: str) -> dict[str, str]:
    if isinstance(error, ProbeError):
        return {"detail": str(error.args[0]), "mend": error.args[1] if len(error.args) > 1 else mend}
    if isinstance(error, ModuleNotFoundError):
        return {"detail": f"{error.name} is not installed", "mend": mend}
    if isinstance(error, OSError) and error.errno:
        return {"detail": f"{errno.errorcode.get(error.errno, error.errno)}: {error.strerror}", "mend": mend}
    return {"detail": _shorten(f"{type(error).__name__}: {error}"), "mend": mend}


def _shorten(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


# --- the report ----------------------------------------------------------------------------------------------------


def examine(checks: Sequence[Check | Callable[[], Finding]] = CHECKS) -> list[Finding]:
    """Ask everything, a few at a time, and answer in the order of `checks`."""
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(ask, checks))


def main(as_json: bool = False, *, checks: Sequence[Check | Callable[[], Finding]] = CHECKS) -> int:
    """Print the report. Returns 1 when something without which nothing trains does not work, else 0."""
    try:
        installed = versions("gpu" if has_gpu() else "cpu")
    except metadata.PackageNotFoundError:
        # Imported from a folder that was never installed: the checks still say what works.
        installed = []
    findings = examine(checks)
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
        _draw(installed, findings, healthy)
    return 0 if healthy else 1


def _draw(installed: Sequence[Version], findings: Sequence[Finding], healthy: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    where = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {'NVIDIA GPU' if has_gpu() else 'no GPU'}"
    console.print(f"[bold]vlmrl {vlmrl.__version__}[/bold] on Python {platform.python_version()}, {where}")
    table = Table("package", "installed", "wanted", box=None, header_style="bold", pad_edge=False)
    for version in installed:
        style = "" if version.ok else "red"
        table.add_row(version.package, version.installed or "missing", version.wanted, style=style)
    console.print(table, "")
    table = Table("", "what", "found", box=None, header_style="bold", pad_edge=False)
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]FAIL[/]" if finding.essential else "[yellow]warn[/]"
        detail = escape(finding.detail) + ("" if finding.ok else f"\n[bold]mend:[/bold] {escape(finding.mend)}")
        table.add_row(mark, finding.name, detail)
    console.print(table, "")
    ready = "[green]Ready.[/green] Next: [bold]make quickstart[/bold], or [bold]vlmrl rl --help[/bold]"
    console.print(ready if healthy else "[red]Not ready:[/red] see the lines marked FAIL.")


if __name__ == "__main__":
    sys.exit(main("--json" in sys.argv[1:]))
