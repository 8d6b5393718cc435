"""Reading other processes, which may end at any moment."""

from __future__ import annotations

import psutil


def command(process: psutil.Process) -> list[str]:
    """Return the words of the command; none when the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def command_line(process: psutil.Process) -> str:
    """Return the words of the command as one line; empty when the process has ended."""
    return " ".join(command(process))


def runs(pid: int) -> bool:
    """Whether a process runs. A zombie does not: in a container, process 1 may never reap it."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def engine_core(worker: int) -> psutil.Process:
    """Return vLLM's own process below the worker with this process ID."""
    children = psutil.Process(worker).children()
    return next(child for child in children if "multiprocessing.spawn" in command_line(child))


def engine_processes(parent: psutil.Process) -> list[psutil.Process]:
    """Return the engine processes below `parent`, forks included, and without Ray's, which other tests may use."""
    engines = [
        process
        for child in parent.children()
        if any(word in command_line(child) for word in ("multiprocessing.spawn", "VLLM"))
        for process in (child, *child.children(recursive=True))
    ]
    forks = (process for process in parent.children(recursive=True) if "VLLM" in command_line(process))
    return [*engines, *(process for process in forks if process not in engines)]
