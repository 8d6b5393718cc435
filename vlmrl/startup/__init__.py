"""Prepare this process and its children for importing torch, vLLM and DeepSpeed: call `prepare()` before torch."""

import os
import sys
from pathlib import Path

from vlmrl.startup.driver import has_gpu

LOCAL_ADDRESSES = ("", "local")
"""Values of RAY_ADDRESS with which a run starts its own cluster. `local` is Ray's own value for that."""
FOLDER = str(Path(__file__).parent)

_DEFAULTS = {
    # Ranks and engines share the cores: engines must not pin their threads to the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_DEDUP_LOGS": "0",
}


_SENT = ("VLLM_USE_V2_MODEL_RUNNER",)
"""Variables whose values are sent to every machine if the user has set them."""


def portable_environment() -> dict[str, str]:
    """Environment variables for a process on any machine; variables that the user has set keep their values.

    Those that depend on a machine's devices are set there, by `prepare`.
    """
    path = os.environ.get("PYTHONPATH", "")
    folders = [FOLDER, *(f for f in path.split(os.pathsep) if f and f != FOLDER)]
    sent = {name: os.environ[name] for name in _SENT if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(folders)} | {k: os.environ.get(k, v) for k, v in _DEFAULTS.items()} | sent


def environment() -> dict[str, str]:
    """Environment variables for a process on this machine."""
    device = {} if has_gpu() else {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}
    return portable_environment() | device


def work_offline() -> None:
    """Let the Hub's libraries ask the network for nothing, here and in child processes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "huggingface_hub.constants" in sys.modules:  # which has read the variable
        vars(sys.modules["huggingface_hub.constants"])["HF_HUB_OFFLINE"] = True


def prepare() -> None:
    """Set the environment and install the start-up hook, here and in child processes.

    Idempotent, imports nothing heavy.
    """
    os.environ.update(environment())
    from vlmrl.startup import sitecustomize

    sitecustomize.install()
