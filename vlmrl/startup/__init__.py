"""Makes this process and those that it starts able to import the stack. Call `prepare()` before torch is imported."""

import os
from pathlib import Path

FOLDER = str(Path(__file__).parent)

_DEFAULTS = {
    # Cores are shared by ranks and engines: threads must not be pinned one engine over another.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",
    "RAY_DEDUP_LOGS": "0",
}


def environment() -> dict[str, str]:
    """What a process of a run needs in its environment; a variable that the user has set keeps the user's value."""
    path = os.environ.get("PYTHONPATH", "")
    folders = [FOLDER, *(f for f in path.split(os.pathsep) if f and f != FOLDER)]
    wanted = dict(_DEFAULTS)
    if Path("/dev/nvidiactl").exists():
        del wanted["DS_ACCELERATOR"]
    return {"PYTHONPATH": os.pathsep.join(folders)} | {k: os.environ.get(k, v) for k, v in wanted.items()}


def prepare() -> None:
    """Arm this process and its children. Idempotent, imports nothing heavy."""
    os.environ.update(environment())
    from vlmrl.startup import sitecustomize

    sitecustomize.install()
