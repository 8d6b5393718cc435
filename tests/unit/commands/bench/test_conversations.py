"""Conversations of `vlmrl bench agents`: the environment, and the replay without it."""

import time
from pathlib import Path

import numpy as np
import pytest

from vlmrl.agents.environments import Environments
from vlmrl.commands.bench import waiting_environment
from vlmrl.commands.bench.conversations import Timed, replay
from vlmrl.data.media import ImageLimits
from vlmrl.types import Group, Prompt, Rollout, Sampling, Segment, Turn

pytestmark = pytest.mark.anyio
SAMPLING = Sampling(n=1, temperature=1.0, top_p=1.0, max_new_tokens=8, seed=3)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def conversation() -> Group:
    """Prompt [5, 6], response [7, 2], feedback [8], response [9, 4, 2]."""
    tokens = np.array([5, 6, 7, 2, 8, 9, 4, 2])
    sampled = np.array([False, False, True, True, False, True, True, True])
    logprobs = np.zeros(8, dtype=np.float32)
    segment = Segment(tokens, sampled, logprobs, np.where(sampled, 0, -1), (Turn(2, 4), Turn(5, 8)))
    prompt = Prompt(4, "episodes:4", "", tokens[:2], tokens[:2], label=None)
    return Group(prompt, (Rollout((segment,), "", "stop"),))


async def test_a_replay_samples_every_turn_behind_its_own_tokens_with_its_own_seed() -> None:
    requests = []

    async def sample(prompt: Prompt, sampling: Sampling) -> Group:
        requests.append((prompt.index, prompt.tokens.tolist(), prompt.request.tolist(), sampling))
        response = np.full(sampling.max_new_tokens, 9)
        tokens = np.concatenate([prompt.tokens, response])
        sampled = np.arange(len(tokens)) >= len(prompt.tokens)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        return Group(prompt, (Rollout.of_response(tokens, sampled, logprobs, "", "length", 0),))

    group = await replay(conversation(), SAMPLING, sample)
    first, second = (SAMPLING.of_turn(episode=0, attempt=0, turn=k, max_new_tokens=n) for k, n in ((0, 2), (1, 3)))
    assert requests == [(4, [5, 6], [5, 6], first), (4, [5, 6, 7, 2, 8], [5, 6, 7, 2, 8], second)]
    assert Timed([group], 1.0, 0.1).sampled_tokens == Timed([conversation()], 1.0, 0.1).sampled_tokens == 5


async def test_the_environment_waits_in_every_step_and_ends_after_its_turns() -> None:
    spec = f"{Path(waiting_environment.__file__)}:make"
    made = Environments(spec, num_workers=1, step_limit_s=30.0, limits=ImageLimits(0, 1, 1))
    async with made, await made.open() as environment:
        assert made.is_async
        first = await environment.reset({"metadata": {"step_s": 0.1, "turns": 2}}, 7)
        assert first.parts == ("This is episode 7.",)
        started = time.monotonic()
        replies = [await environment.step("abc") for _ in range(2)]
        assert time.monotonic() - started >= 0.2
        assert [reply.done for reply in replies] == [False, True]
        assert replies[0].parts == ("That had 3 characters. Go on.",)
