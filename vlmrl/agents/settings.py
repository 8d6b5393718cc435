"""Settings of environments, and of an engine that plays episodes with them.

They import neither torch nor vLLM until `build` runs in the process that uses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.config.agent import Agent
from vlmrl.config.data import Columns
from vlmrl.config.gateway import Gateway
from vlmrl.errors import ConfigError
from vlmrl.rollout.settings import EngineSettings

if TYPE_CHECKING:
    from vlmrl.agents.engine import AgentEngine
    from vlmrl.agents.environments import Environments
    from vlmrl.data.media import InlineMedia
    from vlmrl.types import Media


def attempt_limit_s(agent: Agent) -> float:
    """Return the seconds that an environment may take to play an episode once, from the start of its process to
    `close`."""
    from vlmrl.agents.environments import START_LIMIT_S
    from vlmrl.agents.open_environment import CLOSE_CALL_LIMIT_S

    # The call in which the limit of the episode is reached may come to its own end.
    return START_LIMIT_S + agent.episode_limit_s + agent.step_limit_s + CLOSE_CALL_LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """Settings of `Environments`."""

    spec: str
    """`path/to/file.py:make`, absolute."""
    agent: Agent
    columns: Columns
    log: Path | None
    """File for the output of environments; None: the output of the process that starts them."""

    def build(self, *, engine_limit_s: float = 0.0) -> Environments:
        """Return the environments. `engine_limit_s`: seconds that an engine may take for an episode."""
        from vlmrl.agents.environments import Environments
        from vlmrl.data.media import ImageLimits

        return Environments(
            self.spec,
            num_workers=self.agent.num_workers,
            step_limit_s=self.agent.step_limit_s,
            wait_limit_s=engine_limit_s + attempt_limit_s(self.agent),
            limits=ImageLimits.of(self.columns),
            pass_env=self.agent.pass_env,
            log=self.log,
        )

    def list_tools(self) -> tuple[dict[str, Any], ...]:
        """Start a process, and return the tools of its environments in OpenAI's format.

        Raises:
            ConfigError: the user's file cannot be loaded, or makes no environments; or its tools could never be called.
        """
        from vlmrl.agents.tool_calls import as_function

        async def start() -> tuple[dict[str, Any], ...]:
            environments = self.build()
            try:
                return tuple(as_function(tool) for tool in await environments.start())
            finally:
                await environments.close()

        tools = asyncio.run(start())
        if tools and self.agent.max_turns == 1:
            names = ", ".join(tool["function"]["name"] for tool in tools)
            raise ConfigError(
                f"agent.max_turns 1 leaves no turn for the results of tools ({names}), so that none would be called: "
                "raise it to 2 or more"
            )
        return tools


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEngineSettings:
    """Settings of `AgentEngine`."""

    engine: EngineSettings
    environments: EnvironmentSettings
    share: Callable[[InlineMedia], Media]
    """Stores an image of an environment, and returns the handle that the trainer reads."""
    gateway: Gateway = field(default_factory=Gateway)
    """The server through which an agent of the user's own reaches the policy."""

    def build(self) -> AgentEngine:
        from vlmrl.agents.engine import AgentEngine

        return AgentEngine(self)
