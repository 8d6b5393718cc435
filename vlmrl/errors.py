"""Errors for users. Each message is one line: what is wrong, where it came from, and what to do.

The command line prints the message and exits with code 2, without a traceback. Every class takes exactly one argument,
so that an error raised in a Ray actor can be pickled and raised again in the driver. Messages are escaped to plain text
(`one_line`), because they may quote data.
"""

from vlmrl.system.plain_text import one_line


class VlmrlError(Exception):
    """A problem with settings, data or the machine, not a bug in vlmrl."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(VlmrlError):
    """A setting that is unknown, malformed, or in conflict with another. Several errors are a line each."""

    def __init__(self, message: str) -> None:
        # Not super(): that would join the lines.
        Exception.__init__(self, "\n".join(map(one_line, message.split("\n"))))


class DataError(VlmrlError):
    """A dataset, row or image that cannot be used."""


class EndOfRowsError(DataError):
    """The rows of all epochs of a run are drawn: those that are left do not fill a batch."""

    left_out: int = 0
    """Number of usable rows that are left."""


class RewardError(VlmrlError):
    """A reward function that is missing, broken, or fails too often."""


class ClusterError(VlmrlError):
    """A machine, port or amount of memory that is not available, or a role that does not fit."""


class MachineError(ClusterError):
    """A machine of the run died or did not join in time. The same command may succeed later: its exit code is 75."""


class DiedError(ClusterError):
    """A process that a role started (vLLM's) ended unexpectedly. `cluster/worker_group.py` adds the role's name."""


class EngineLossError(ClusterError):
    """Engines died more often than `vllm.max_restarts` allows, or do not respond. The run saves its last step."""


class SyncError(VlmrlError):
    """Engine and trainer do not compute the same: their weights, pixels or tokens differ."""


class StorageError(VlmrlError):
    """A write that failed because the disk is full, read-only or damaged."""
