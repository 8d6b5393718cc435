"""A rollout engine whose responses are conversations with an environment."""

from __future__ import annotations

from typing import Any

from vlmrl.agents.episodes import Player
from vlmrl.agents.settings import AgentEngineSettings
from vlmrl.agents.tool_calls import ToolCallParser, as_function
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.tool_parsers import tool_format, vllm_tool_parser
from vlmrl.types import Group, Prompt, Sampling


class AgentEngine(RolloutEngine):
    """A rollout engine with environments in processes beside it. A conversation stays with it, so that each turn finds
    the ones before in the prefix cache.
    """

    def __init__(self, settings: AgentEngineSettings) -> None:
        """Start nothing yet."""
        super().__init__(settings.engine)
        self._agent = settings.environments.agent
        self._columns = settings.engine.columns
        self._share = settings.share
        self._environments = settings.environments.build(engine_limit_s=settings.engine.vllm.generate_timeout_s)
        self._player: Player | None = None
        self._notes: tuple[str, ...] = ()

    async def start(self) -> None:
        """Start vLLM and the first environment. Raises the errors of `RolloutEngine.start`.

        Raises:
            ConfigError: the user's file cannot be loaded, or the model's chat template cannot hold its conversations.
        """
        await super().start()
        try:
            self._player = await self._start_environments()
        except BaseException:
            await self.shutdown()
            raise

    async def _start_environments(self) -> Player:
        processor, tools = self._processor, await self._environments.start()
        report = processor.check_bridge()
        self._notes = report.notes(history=self._agent.history, has_tools=bool(tools))
        parser = None
        if tools:
            functions = [as_function(tool) for tool in tools]
            template = processor.tokenizer.chat_template
            name = tool_format(
                self._agent.tool_format,
                template if isinstance(template, str) else None,
                shows_tools=report.shows_tools,
            )
            parser = ToolCallParser(processor, vllm_tool_parser(name, processor.tokenizer, functions), name)
            listed = ", ".join(tool.name for tool in tools)
            self._notes = (f"tools of the environment: {listed}; calls are read in the format {name}", *self._notes)
        return Player(
            settings=self._agent,
            environments=self._environments,
            tools=tools,
            parser=parser,
            processor=processor,
            columns=self._columns,
            sample=self.generate,
            share=self._share,
        )

    async def shutdown(self) -> None:
        await self._environments.close()
        await super().shutdown()

    async def status(self) -> dict[str, Any]:
        """See `RolloutEngine.status`; `notes` are lines for users about the conversations."""
        return await super().status() | {"notes": self._notes}

    async def respond(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Play `sampling.n` episodes; see `Player.play`. Raises the errors of `generate` too."""
        assert self._player is not None, "the engine has not been started"
        return await self._player.play(prompt, sampling)
