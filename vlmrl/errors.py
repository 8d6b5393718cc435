"""The errors a user may meet. Each is one line that names the thing, where it came from and what to do.

The command line prints the line and exits with code 2, without a traceback. Every class takes exactly one argument,
so that an error raised in a Ray actor is pickled and raised again in the driver as itself. Whatever of the data a
message quotes, it is plain text (`one_line`).
"""

from vlmrl.system.plain_text import one_line


class VlmrlError(Exception):
    """A mistake in what vlmrl was given, never a bug of vlmrl's own."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(VlmrlError):
    """A setting that is unknown, malformed, or at odds with another. Several mistakes are a line each."""

    def __init__(self, message: str) -> None:
        # Not super(): that would join the lines.
        Exception.__init__(self, "\n".join(map(one_line, message.split("\n"))))


class DataError(VlmrlError):
    """A dataset, row or image that cannot be used."""


class RewardError(VlmrlError):
    """A reward function that is missing, broken, or fails too often."""


class ClusterError(VlmrlError):
    """A machine, port or amount of memory that is not there, or a role that does not fit."""


class DiedError(ClusterError):
    """A process that a role has started ended in the middle of its work; whoever asked the role knows which it is."""


class SyncError(VlmrlError):
    """Rollout engine and trainer are not the same function: other weights, other pixels, other tokens."""


class StorageError(VlmrlError):
    """A disk that is full, read-only or damaged, and what was to be written there."""
