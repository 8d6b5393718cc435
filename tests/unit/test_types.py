"""Sampling settings: seeds of requests, and values that no engine can sample with."""

import dataclasses

import pytest

from vlmrl.errors import ConfigError
from vlmrl.types import Sampling

SAMPLING = Sampling(n=8, temperature=1.0, top_p=1.0, max_new_tokens=16, seed=42)


def test_the_seed_of_a_request_follows_from_run_and_prompt_alone() -> None:
    assert SAMPLING.request_seed(3) == dataclasses.replace(SAMPLING, n=2, temperature=0.5).request_seed(3)
    assert SAMPLING.request_seed(3) != dataclasses.replace(SAMPLING, seed=43).request_seed(3)


def test_responses_to_neighbouring_prompts_never_share_seeds() -> None:
    seeds = [SAMPLING.request_seed(index) + response for index in range(500) for response in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert 0 <= min(seeds) <= max(seeds) < 2**63


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "cannot sample 0 responses of 16 tokens"),
        ({"max_new_tokens": 0}, "cannot sample 8 responses of 0 tokens"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"temperature": 0.0}, "temperature 0 gives 8 times the same response"),
    ],
)
def test_values_that_cannot_be_sampled_with_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SAMPLING, **settings)  # type: ignore[arg-type]
