"""A rollout engine whose responses are conversations with an environment."""

from __future__ import annotations

from typing import Any

from vlmrl.agents.episodes import Player
from vlmrl.agents.gateway.player import AgentPlayer
from vlmrl.agents.gateway.server import Keys, Server, make_app
from vlmrl.agents.gateway.serving import Serving
from vlmrl.agents.parsers import call_parser, parsers
from vlmrl.agents.settings import AgentEngineSettings
from vlmrl.agents.tool_calls import as_function
from vlmrl.errors import ConfigError
from vlmrl.rollout.engine import RolloutEngine
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
        self._gateway = settings.gateway
        self._player: Player | AgentPlayer | None = None
        self._server: Server | None = None
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

    async def _start_environments(self) -> Player | AgentPlayer:
        processor, tools = self._processor, await self._environments.start()
        report = processor.check_bridge()
        self._notes = report.notes(history=self._agent.history, has_tools=bool(tools))
        if self._environments.is_agent:
            return await self._start_gateway()
        parser = None
        if tools:
            parser = call_parser(processor, [as_function(tool) for tool in tools], self._agent.tool_format)
            listed = ", ".join(tool.name for tool in tools)
            named = f"calls are read in the format {parser.tool_format}"
            self._notes = (f"tools of the environment: {listed}; {named}", *self._notes)
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

    async def _start_gateway(self) -> AgentPlayer:
        if self._agent.history == "template":
            raise ConfigError(
                "agent.history template: an agent with async def run(task) sends its history itself: set agent.history "
                "to keep"
            )
        serving = Serving(
            gateway=self._gateway,
            processor=self._processor,
            columns=self._columns,
            sample=self.generate,
            share=self._share,
            parser_of=parsers(self._processor, self._agent.tool_format),
            context_len=self._agent.context_len,
            max_images=self._agent.max_images,
            max_turns=self._agent.max_turns,
        )
        keys = Keys()
        app = make_app(keys.find, self._gateway, self._processor, lambda: keys.episodes)
        self._server = Server(app, self._gateway)
        await self._server.start()
        self._notes = (f"gateway: {self._server.base_url}", *self._notes)
        return AgentPlayer(
            settings=self._agent,
            environments=self._environments,
            serving=serving,
            keys=keys,
            base_url=self._server.base_url,
        )

    async def shutdown(self) -> None:
        await self._environments.close()
        if self._server is not None:
            await self._server.stop()
        await super().shutdown()

    async def status(self) -> dict[str, Any]:
        """See `RolloutEngine.status`; `notes` are lines for users about the conversations."""
        return await super().status() | {"notes": self._notes}

    async def respond(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Play `sampling.n` episodes; see `Player.play` and `AgentPlayer.play`. Raises the errors of `generate` too."""
        assert self._player is not None, "the engine has not been started"
        return await self._player.play(prompt, sampling)
