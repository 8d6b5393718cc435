"""Prompts as vLLM's requests, and its outputs as groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from vlmrl.data.media import InlineMedia
from vlmrl.data.responses import to_samples, truncate
from vlmrl.errors import SyncError
from vlmrl.rollout import requests
from vlmrl.types import Ints, Prompt, Rollout, Sampling, Turn

IMAGE = InlineMedia("cafe", (3, 2), np.arange(18, dtype=np.uint8).reshape(2, 3, 3))
PIXELS = {"images_kwargs": {"size": {"shortest_edge": 1, "longest_edge": 9}}}


def prompt(tokens: Sequence[int] = (5, 9, 9, 6), request: Sequence[int] = (5, 9, 6), media: Any = (IMAGE,)) -> Prompt:
    return Prompt(7, "dice:7", "?", np.array(tokens), np.array(request), label=None, media=tuple(media))


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Logprob:
    logprob: float


@dataclass
class Completion:
    index: int
    token_ids: list[int]
    finish_reason: str | None = "stop"
    versions: tuple[int, ...] = (3,)
    logprobs: Any = field(init=False)
    weight_versions: list[Span] | None = field(init=False)
    routed_experts: Any = None

    def __post_init__(self) -> None:
        self.logprobs = [{token: Logprob(-float(token)), 999: Logprob(0.0)} for token in self.token_ids]
        edges = [*range(len(self.versions)), len(self.token_ids)]
        self.weight_versions = [Span(str(v), *edges[i : i + 2]) for i, v in enumerate(self.versions)]


@dataclass
class Output:
    outputs: list[Completion]
    prompt_token_ids: Sequence[int] | None = (5, 9, 9, 6)
    prompt_logprobs: Sequence[Any] | None = None


def decode(tokens: Ints) -> str:
    return "-".join(map(str, tokens))


def test_images_are_sent_with_their_content_hashes_as_ids() -> None:
    request = requests.engine_prompt(prompt(), PIXELS)
    assert request["prompt_token_ids"] == [5, 9, 6]
    assert request["multi_modal_uuids"] == {"image": ["cafe"]}
    assert request["mm_processor_kwargs"] == PIXELS
    (image,) = request["multi_modal_data"]["image"]
    assert image.size == (3, 2)
    assert np.array_equal(np.asarray(image), IMAGE.pixels)


def test_a_prompt_without_images_is_only_its_tokens() -> None:
    assert requests.engine_prompt(prompt(media=()), PIXELS) == {"prompt_token_ids": [5, 9, 6]}


def test_sampling_settings_get_vllms_names() -> None:
    sampling = Sampling(n=2, temperature=0.5, top_p=0.9, max_new_tokens=16, seed=1)
    parameters = requests.sampling_parameters(sampling, index=7, eos_token_ids=(2, 3), banned_tokens=(9, 8))
    assert parameters == {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 16,
        "seed": sampling.request_seed(7),
        "stop_token_ids": [2, 3],
        "logit_bias": {9: -100.0, 8: -100.0},
        "logprobs": 0,
        "detokenize": False,
    }
    assert requests.sampling_parameters(sampling, index=7, eos_token_ids=(2,), banned_tokens=())["logit_bias"] is None


def test_texts_that_end_a_response_are_looked_for_in_the_text() -> None:
    sampling = Sampling(n=1, temperature=1.0, top_p=1.0, max_new_tokens=16, seed=1, stop=("Observation:",))
    parameters = requests.sampling_parameters(sampling, index=7, eos_token_ids=(2,), banned_tokens=())
    assert (parameters["stop"], parameters["detokenize"]) == (["Observation:"], True)


def test_the_experts_of_all_tokens_but_the_last_come_with_a_response() -> None:
    """Four tokens of the prompt and one of the response were inputs; two layers, two experts each."""
    chosen = np.arange(20, dtype=np.uint8).reshape(5, 2, 2)
    output = Output([Completion(0, [7, 2], routed_experts=chosen)])
    (rollout,) = requests.to_group(prompt(), output, decode=decode, has_experts=True).rollouts
    group = requests.to_group(prompt(), output, decode=decode, has_experts=True)
    (sample,) = to_samples([group])
    assert sample.experts is not None
    assert np.array_equal(sample.experts, chosen)
    assert truncate(rollout.segments[0], 1).experts is not None
    (plain,) = requests.to_group(prompt(), output, decode=decode).rollouts
    assert plain.segments[0].experts is None, "nobody asked for them"
    for wrong in (None, chosen[:4]):
        output = Output([Completion(0, [7, 2], routed_experts=wrong)])
        with pytest.raises(SyncError, match=r"recorded the experts of (no|4) tokens instead of 5"):
            requests.to_group(prompt(), output, decode=decode, has_experts=True)


def test_responses_become_rollouts_in_the_order_of_their_seeds() -> None:
    output = Output([Completion(1, [4], "length", (3,)), Completion(0, [7, 2], "stop", (3, 4))])
    first, second = requests.to_group(prompt(), output, decode=decode).rollouts
    (segment,) = first.segments
    assert segment.tokens.tolist() == [5, 9, 9, 6, 7, 2]
    assert segment.sampled.tolist() == [False, False, False, False, True, True]
    assert segment.logprobs.tolist() == [0.0, 0.0, 0.0, 0.0, -7.0, -2.0]
    assert segment.versions.tolist() == [-1, -1, -1, -1, 3, 4], "each token has the version that sampled it"
    assert segment.turns == (Turn(4, 6),)
    assert segment.media == prompt().media
    assert (segment.tokens.dtype, segment.sampled.dtype, segment.logprobs.dtype) == (np.int64, np.bool_, np.float32)
    assert (first.text, first.finish_reason, first.versions) == ("7-2", "stop", (3, 4))
    assert (second.text, second.finish_reason, second.versions) == ("4", "length", (3,))


def test_a_token_without_a_version_is_an_error() -> None:
    output = Output([Completion(0, [7, 2], "stop", (3,))])
    assert output.outputs[0].weight_versions is not None
    output.outputs[0].weight_versions[0].end = 1
    with pytest.raises(SyncError, match="does not say which weights sampled every token"):
        requests.to_group(prompt(), output, decode=decode)


def test_a_response_of_two_versions_is_reported_as_mixed() -> None:
    mixed, pure = Output([Completion(0, [7, 2], versions=(3, 4))]), Output([Completion(0, [7], versions=(4,))])
    assert (requests.is_mixed(mixed), requests.is_mixed(pure)) == (True, False)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((5, 9, 6), "dice:7: vLLM read 3 tokens where the trainer reads 4; its 1 images must reach both"),
        ((5, 9, 8, 6), "dice:7: vLLM read token 8 where the trainer reads 9, at position 2 of 4; its 1 images"),
        (None, "dice:7: vLLM read 0 tokens where the trainer reads 4"),
    ],
)
def test_other_tokens_than_the_trainers_are_an_error(token_ids: Sequence[int] | None, message: str) -> None:
    with pytest.raises(SyncError, match=message):
        requests.to_group(prompt(), Output([Completion(0, [7])], token_ids), decode=decode)


def test_an_aborted_response_is_an_error() -> None:
    with pytest.raises(SyncError, match=r"dice:7: the rollout engine aborted a response \(abort\)"):
        requests.to_group(prompt(), Output([Completion(0, [7], "abort")]), decode=decode)


def extended(*response: int) -> Prompt:
    tokens = np.array([5, 9, 9, 6, *response])
    logprobs = np.zeros(len(tokens), np.float32)
    rollout = Rollout.of_response(tokens, np.arange(len(tokens)) >= 4, logprobs, "", "stop", 3, media=(IMAGE,))
    return requests.as_prompt(prompt(), rollout.segments[0], np.array([5, 9, 6, *response]))


def scored(*tokens: int) -> Output:
    """vLLM's scores of a prompt: None for the first token, and for the others perhaps more than the token's own."""
    scores = [None, *({token: Logprob(-float(token)), 999: Logprob(0.0)} for token in tokens[1:])]
    return Output([Completion(0, [1])], tokens, scores)


def test_a_response_is_scored_as_the_end_of_a_prompt() -> None:
    longer = extended(7, 2)
    assert requests.engine_prompt(longer, PIXELS)["prompt_token_ids"] == [5, 9, 6, 7, 2]
    assert len(longer.media) == 1
    assert requests.scoring_parameters()["prompt_logprobs"] == 0
    logprobs = requests.prompt_logprobs(longer, scored(5, 9, 9, 6, 7, 2), sampled=np.arange(6) >= 4)
    assert logprobs.tolist() == [0.0, 0.0, 0.0, 0.0, -7.0, -2.0]
    assert logprobs.dtype == np.float32


def test_a_response_that_was_misread_or_not_scored_is_an_error() -> None:
    with pytest.raises(SyncError, match="dice:7: vLLM read 5 tokens where the trainer reads 6"):
        requests.prompt_logprobs(extended(7, 2), scored(5, 9, 6, 7, 2), sampled=np.arange(6) >= 4)
    unscored = Output([Completion(0, [1])], (5, 9, 9, 6, 7))
    with pytest.raises(SyncError, match="dice:7: vLLM scored 0 of the 5 requested tokens"):
        requests.prompt_logprobs(extended(7), unscored, sampled=np.arange(6) >= 4)
