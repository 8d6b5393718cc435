"""Conversations of a served model: one for each key."""

import asyncio
import sys

import pytest
from agents.gateway.scripted import SAMPLING, ScriptedSampler, serving
from chat_templates import text_processor

from vlmrl.agents.gateway import sessions
from vlmrl.agents.gateway.sessions import Sessions

pytestmark = pytest.mark.anyio
ASK = b'{"messages": [{"role": "user", "content": "Which way?"}]}'


def opened(token: str | None = None, *, delay_s: float = 0.0) -> Sessions:
    one = text_processor("chatml")
    sample = ScriptedSampler(one, lambda text, number: "left", delay_s)
    return Sessions(serving(one, sample, max_turns=sys.maxsize), SAMPLING, token=token)


async def test_a_token_is_the_beginning_of_all_keys() -> None:
    with_token, without = opened("secret"), opened()
    for key in ("secret", "secret/one", "secret/one/two"):
        assert with_token.find(key) is with_token.find(key)
        assert with_token.find(key) is not None
    for key in ("", "secre", "secrets", "/secret", "sécret"):
        assert with_token.find(key) is None
        assert without.find(key) is not None
    assert with_token.find("secret") is not with_token.find("secret/one")


async def test_a_long_session_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_RESPONSES", 4)
    one = opened()
    first = one.find("a")
    assert first is not None
    for _ in range(2):
        await (await first.request(ASK, is_retry=False)).task
    assert one.find("a") is not first
    await first.close()


async def test_a_long_session_that_is_never_idle_begins_anew_and_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_RESPONSES", 10)
    one, used = opened(delay_s=0.005), set()
    ask = b'{"messages": [{"role": "user", "content": "Which way at %d of %d?"}]}'

    async def client(number: int) -> None:
        for step in range(10):
            session = one.find("")
            assert session is not None
            used.add(session)
            await (await session.request(ask % (step, number), is_retry=False)).task

    await asyncio.gather(*(client(number) for number in range(4)))
    assert sum(len(session.tree.nodes) for session in used) == 40
    assert max(len(session.tree.nodes) for session in used) <= 10 + 4, "with those that were in progress"


async def test_sessions_that_were_used_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_RESPONSES", 6)
    one = opened()
    for name in "abc":
        session = one.find(name)
        assert session is not None
        for _ in range(2):
            await (await session.request(ASK, is_retry=False)).task
    kept = one.find("c")
    assert kept is not None
    assert len(kept.tree.nodes) == 2
    again = one.find("a")
    assert again is not None
    assert len(again.tree.nodes) == 0


async def test_sessions_are_forgotten_for_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    one = opened()
    first = one.find("a")
    assert first is not None
    await (await first.request(ASK, is_retry=False)).task
    assert first.num_bytes >= 40 * len(first.tree.nodes[0].conversation.tokens)
    monkeypatch.setattr(sessions, "MAX_BYTES", 3 * first.num_bytes)
    for name in "bcd":
        session = one.find(name)
        assert session is not None
        await (await session.request(ASK, is_retry=False)).task
    assert one.find("b") is not None
    assert one.find("a") is not first, "it was the fourth"
    monkeypatch.setattr(sessions, "MAX_BYTES", first.num_bytes)
    last = one.find("e")
    assert last is not None
    await (await last.request(ASK, is_retry=False)).task
    assert one.find("e") is not last, "a session may take half of it"
