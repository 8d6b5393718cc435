"""The gateway: an OpenAI-compatible server in front of the engines."""

from typing import Literal

from pydantic import Field

from vlmrl.config.base import PositiveFloat, PositiveInt, Section, Text, Unread
from vlmrl.config.names import settings


class Gateway(Section):
    """The OpenAI-compatible server through which an agent of your own, `async def run(task)`, reaches the policy."""

    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    other_settings: Literal["override", "refuse"] = "override"
    """What requests with sampling settings other than the run's get (`temperature`, `top_p`, `tool_choice`, ...).
    `override`: the run's are used, and they are counted by name. `refuse`: status 400 with the reason."""
    max_request_mib: PositiveInt = 32
    """Maximum size of a request, images included; a larger one is refused (413)."""
    max_concurrent: PositiveInt = 64
    """Maximum number of requests of one episode in progress; a request beyond it is refused for now (429)."""
    body_timeout_s: PositiveFloat = 60.0
    """Time limit for a request to arrive completely (408)."""


def unread_of_gateway(*, has_agent: bool) -> Unread:
    if has_agent:
        return {}
    return dict.fromkeys(settings(Gateway, "gateway."), "without train.agent_func_path there is no agent")
