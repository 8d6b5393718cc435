"""Makes this process and those that it starts able to import the stack. Call `prepare()` before torch is imported."""

import os
from pathlib import Path

from vlmrl.startup.driver import has_gpu

FOLDER = str(Path(__file__).parent)

_DEFAULTS = {
    # Cores are shared by ranks and engines: threads must not be pinned one engine over another.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_DEDUP_LOGS": "0",
}


_SENT = ("VLLM_USE_V2_MODEL_RUNNER",)
"""The user's word on these holds on every machine."""


def portable_environment() -> dict[str, str]:
    """What a process of a run needs in its environment on any machine; a variable that the user has set keeps the
    user's value. What depends on a machine's devices is left to `prepare`, there.
    """
    path = os.environ.get("PYTHONPATH", "")
    folders = [FOLDER, *(f for f in path.split(os.pathsep) if f and f != FOLDER)]
    sent = {name: os.environ[name] for name in _SENT if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(folders)} | {k: os.environ.get(k, v) for k, v in _DEFAULTS.items()} | sent


def environment() -> dict[str, str]:
    """The same for a process on this machine."""
    device = {} if has_gpu() else {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}
    return portable_environment() | device


def prepare() -> None:
    """Arm this process and its children. Idempotent, imports nothing heavy."""
    os.environ.update(environment())
    from vlmrl.startup import sitecustomize

    sitecustomize.install()
