"""The reward server."""

from typing import Self

from pydantic import Field, model_validator

from vlmrl.config.base import ConflictError, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Text


class Serve(Section):
    """The reward server. Its token comes from the environment variable VLMRL_RM_TOKEN, required beyond loopback."""

    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=5000, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    max_batch: PositiveInt = 64
    """Maximum number of responses scored together."""
    max_wait_ms: NonNegativeFloat = 10.0
    """Time that a response waits for others to form a batch."""
    max_queue: PositiveInt = 1024
    """Maximum number of waiting responses; a request beyond it is refused for now (503)."""
    body_timeout_s: PositiveFloat = 60.0
    """Time limit for a request to arrive completely (408)."""
    stop_grace_s: PositiveFloat = 60.0
    """Time limit for requests in progress after SIGTERM or Ctrl-C."""
    max_request_pixels: PositiveInt = 268_435_456
    """Maximum total of decoded pixels of the images of one request; a request with more is refused (413)."""

    @model_validator(mode="after")
    def check_queue(self) -> Self:
        if self.max_queue < self.max_batch:
            raise ConflictError(
                [f"serve.max_queue {self.max_queue} does not hold a batch, serve.max_batch {self.max_batch}: raise it"]
            )
        return self
