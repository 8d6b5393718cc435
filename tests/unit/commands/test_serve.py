"""`vlmrl serve`: signals while the model is loading, and afterwards."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest
from chat_templates import text_processor

from vlmrl.commands import serve
from vlmrl.config.serving import PolicyServeConfig

pytestmark = pytest.mark.anyio


class Engine:
    """An engine that gets one signal while it loads, and another afterwards."""

    is_shut_down = False

    async def start(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.2)
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)

    async def generate(self) -> None:
        """Nobody asks."""

    async def shutdown(self) -> None:
        self.is_shut_down = True


async def test_a_signal_ends_the_process_at_once_while_the_model_loads_and_in_order_afterwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, killed = Engine(), list[tuple[str, int]]()
    monkeypatch.setattr(serve, "processor_of", lambda *_, **__: text_processor("chatml"))
    monkeypatch.setattr(serve, "_engine_settings", lambda _: SimpleNamespace(build=lambda: engine))
    monkeypatch.setattr(serve, "kill_and_exit", lambda line, code: killed.append((line, code)))
    config = PolicyServeConfig.model_validate({"actor": {"model_name_or_path": "tiny"}})
    await asyncio.wait_for(serve._serve(config, None), 30.0)
    assert killed == [("stopped by SIGINT while the model was loading", 130)]
    assert engine.is_shut_down
    assert "vlmrl serve: http://127.0.0.1:" in capsys.readouterr().out
