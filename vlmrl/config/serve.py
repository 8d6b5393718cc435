"""The reward server."""

from typing import Self

from pydantic import Field, model_validator

from vlmrl.config.base import ConflictError, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Text


class Serve(Section):
    """The reward server. Its token comes from the environment variable VLMRL_RM_TOKEN; off loopback it needs one."""

    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=5000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    max_batch: PositiveInt = 64
    """Most responses scored at once."""
    max_wait_ms: NonNegativeFloat = 10.0
    """How long a response waits for others to be scored with."""
    max_queue: PositiveInt = 1024
    """Responses that may wait; a request beyond is told to come back later (503)."""
    body_timeout_s: PositiveFloat = 60.0
    """A request must have arrived whole after so long; else it is given up (408)."""
    stop_grace_s: PositiveFloat = 60.0
    """Told to stop (SIGTERM, Ctrl-C), the server answers what is under way for so long at most, and ends."""

    max_request_pixels: PositiveInt = 268_435_456
    """Most pixels that the images of one request decode to together; a request with more is refused (413)."""

    @model_validator(mode="after")
    def check_queue(self) -> Self:
        if self.max_queue < self.max_batch:
            raise ConflictError(
                [f"serve.max_queue {self.max_queue} does not hold a batch, serve.max_batch {self.max_batch}: raise it"]
            )
        return self
