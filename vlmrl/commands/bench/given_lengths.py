"""The engine of `vlmrl bench async` without an environment: each row gives the length of its responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlmrl.rollout.engine import RolloutEngine
from vlmrl.types import Group, Prompt, Sampling


class GivenLengthEngine(RolloutEngine):
    """An engine whose responses have the length in their row's `response_tokens`: no token ends them earlier."""

    async def respond(self, prompt: Prompt, sampling: Sampling) -> Group:
        return await self.generate(prompt, replace(sampling, max_new_tokens=prompt.metadata["response_tokens"]))

    async def _request(self, prompt: Prompt, parameters: dict[str, Any], *, adapter: bool, priority: int = 0) -> Any:
        endless = parameters | {"stop_token_ids": [], "ignore_eos": True}
        return await super()._request(prompt, endless, adapter=adapter, priority=priority)
