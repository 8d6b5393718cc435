"""`vlmrl serve`: the gateway in front of a model, so that an agent is tried as it was trained."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys

from vlmrl.agents.gateway.server import Server, make_app
from vlmrl.agents.gateway.serving import Serving
from vlmrl.agents.gateway.sessions import Sessions
from vlmrl.agents.parsers import parsers
from vlmrl.config.serving import PolicyServeConfig
from vlmrl.errors import ConfigError
from vlmrl.models.max_length import check_length
from vlmrl.plugins import Processor, processor_of
from vlmrl.rewards.server import is_loopback
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.settings import EngineSettings
from vlmrl.system.stops import kill_and_exit
from vlmrl.types import Sampling

TOKEN = "VLMRL_GATEWAY_TOKEN"
"""The environment variable that holds the token of clients."""
_LOOK_AGAIN_S = 1.0
"""Interval at which the server looks whether its engine has failed."""


def serve(config: PolicyServeConfig) -> None:
    """Serve until the process gets a signal to stop.

    Raises ConfigError for a model that cannot be loaded, an address that cannot be had, and one that others reach
    without a token; ClusterError when the engine fails.
    """
    token = _read_token()
    if token is None and not is_loopback(config.gateway.host):
        raise ConfigError(
            f"gateway.host {config.gateway.host} is open to other machines: set the environment variable {TOKEN} to a "
            "secret of your choice, which clients send as their key, or leave gateway.host at 127.0.0.1"
        )
    check_length(
        config.actor.model_name_or_path,
        config.agent.context_len,
        settings=f"agent.context_len {config.agent.context_len}",
        trust_remote_code=config.actor.trust_remote_code,
    )
    asyncio.run(_serve(config, token))


async def _serve(config: PolicyServeConfig, token: str | None) -> None:
    loaded, stopped = asyncio.Event(), asyncio.Event()

    def stop(number: signal.Signals) -> None:
        if not loaded.is_set():  # which may take minutes, and nothing interrupts it
            kill_and_exit(f"stopped by {number.name} while the model was loading", 128 + number)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    model, columns = config.actor, config.data
    processor = processor_of(model.model_name_or_path, columns, trust_remote_code=model.trust_remote_code)
    notes = processor.check_bridge().notes(history="keep", has_tools=True)
    engine = _engine_settings(config).build()
    sessions = Sessions(_serving(config, processor, engine), _sampling(config), token=token)
    server = Server(make_app(sessions.find, config.gateway, processor, lambda: sessions.sessions), config.gateway)
    try:
        print(f"loading {model.model_name_or_path}", flush=True)
        await engine.start()
        loaded.set()
        await server.start()
        for line in (*notes, _sampling_note(config)):
            print(line)
        print(f"vlmrl serve: {server.base_url}", flush=True)
        while not stopped.is_set():
            failures = [session.failure for session in sessions.sessions if session.failure.done()]
            if failures:
                raise failures[0].result()
            try:
                await asyncio.wait_for(stopped.wait(), _LOOK_AGAIN_S)
            except TimeoutError:
                continue
    finally:
        await server.stop()
        await engine.shutdown()


def _serving(config: PolicyServeConfig, processor: Processor, engine: RolloutEngine) -> Serving:
    return Serving(
        gateway=config.gateway,
        processor=processor,
        columns=config.data,
        sample=engine.generate,
        share=lambda image: image,
        parser_of=parsers(processor, config.agent.tool_format),
        context_len=config.agent.context_len,
        max_images=config.agent.max_images,
        max_turns=sys.maxsize,  # sessions that have become long begin anew
    )


def _sampling(config: PolicyServeConfig) -> Sampling:
    rollout = config.rollout
    return Sampling(1, rollout.temperature, rollout.top_p, rollout.max_new_tokens, config.train.seed)


def _sampling_note(config: PolicyServeConfig) -> str:
    rollout = config.rollout
    others = "are refused" if config.gateway.other_settings == "refuse" else "are not used"
    return (
        f"sampling: rollout.temperature {rollout.temperature:g}, rollout.top_p {rollout.top_p:g}, "
        f"rollout.max_new_tokens {rollout.max_new_tokens}; other settings of requests {others}"
    )


def _engine_settings(config: PolicyServeConfig) -> EngineSettings:
    return EngineSettings(
        model=config.actor.model_name_or_path,
        vllm=config.vllm,
        columns=config.data,
        trust_remote_code=config.actor.trust_remote_code,
        dtype=config.ds.param_dtype,
        max_model_len=config.agent.context_len,
        max_images=config.agent.max_images,
        top_p=config.rollout.top_p,
        temperature=config.rollout.temperature,
        name="vllm",
    )


def _read_token() -> str | None:
    """Return the token from the environment, if any. Raises ConfigError if an HTTP header cannot carry it."""
    token = os.environ.get(TOKEN, "").strip()
    if not re.fullmatch(r"[A-Za-z0-9._~+=-]*", token):
        raise ConfigError(f"the environment variable {TOKEN} may hold only letters, digits and . _ ~ + = -")
    return token or None
