"""A prompt as vLLM takes it, and what vLLM answers as a group. Knows the shape of vLLM's objects, imports nothing of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from vlmrl.errors import SyncError
from vlmrl.rollout.sampling import Sampling
from vlmrl.types import FinishReason, Floats, Group, Ints, Prompt, Rollout

ADAPTER_ID = 1
"""vLLM's number of the one adapter that an engine may have."""

_FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class Span(Protocol):
    """Tokens of an answer that one version of the weights produced (vLLM's WeightVersionSpan)."""

    version: str


class Completion(Protocol):
    """One answer (vLLM's CompletionOutput)."""

    index: int
    token_ids: Sequence[int]
    logprobs: Any
    """One mapping of token to an object with `logprob` for each token."""
    finish_reason: str | None
    weight_versions: Sequence[Span] | None


class Answer(Protocol):
    """All answers to one prompt (vLLM's RequestOutput)."""

    prompt_token_ids: Sequence[int] | None
    prompt_logprobs: Sequence[Any] | None
    """When asked for: None for the first token, then one mapping of token to an object with `logprob` for each."""
    outputs: Sequence[Completion]


def engine_prompt(prompt: Prompt, engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's TokensPrompt. Fetches the pixels, which may block: keep it off an event loop when there are images."""
    request: dict[str, Any] = {"prompt_token_ids": prompt.request.tolist()}
    if prompt.media:
        from PIL import Image

        request["multi_modal_data"] = {"image": [Image.fromarray(media.fetch()) for media in prompt.media]}
        # vLLM knows an image by our content hash: it need not hash the pixels again, and it encodes equal images once.
        request["multi_modal_uuids"] = {"image": [media.hash for media in prompt.media]}
        request["mm_processor_kwargs"] = dict(engine_kwargs)
    return request


def sampling_parameters(
    sampling: Sampling, *, index: int, eos_token_ids: Sequence[int], banned_tokens: Sequence[int]
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for the prompt with this index."""
    return {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": sampling.request_seed(index),
        "stop_token_ids": list(eos_token_ids),
        "logit_bias": dict.fromkeys(banned_tokens, -100.0) or None,
        "logprobs": 0,
        "detokenize": False,
    }


def with_answer(prompt: Prompt, rollout: Rollout) -> Prompt:
    """The prompt with what came after it: how vLLM is asked about tokens that are there already."""
    answer = rollout.tokens[len(prompt.tokens) :]
    return replace(prompt, tokens=rollout.tokens, request=np.concatenate([prompt.request, answer]))


def scoring_parameters() -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for log-probs of the prompt itself. vLLM must generate a token, and does."""
    return {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}


def prompt_logprobs(prompt: Prompt, answer: Answer, *, first: int) -> Floats:
    """[T] of the prompt's tokens from `first` on; 0 before.

    Raises SyncError when vLLM read another prompt than ours, or did not score it.
    """
    check_prompt(prompt, answer.prompt_token_ids)
    found: Floats = np.zeros(len(prompt.tokens), dtype=np.float32)
    scores = answer.prompt_logprobs or ()
    if len(scores) != len(found):
        raise SyncError(
            f"{prompt.source}: vLLM scored {len(scores)} of the {len(found)} tokens that it was asked about"
        )
    places = range(first, len(found))
    found[first:] = [scores[place][int(prompt.tokens[place])].logprob for place in places]
    return found


def check_prompt(prompt: Prompt, seen: Sequence[int] | None) -> None:
    """Raise SyncError unless the tokens that vLLM read are the tokens that the trainer will read.

    They differ when the two sides resize images differently or when images got lost on the way.
    """
    ours, theirs = prompt.tokens, np.asarray(seen if seen is not None else (), dtype=np.int64)
    if np.array_equal(ours, theirs):
        return
    if len(ours) != len(theirs):
        what = f"vLLM read {len(theirs)} tokens where the trainer reads {len(ours)}"
    else:
        place = int(np.flatnonzero(ours != theirs)[0])
        what = f"vLLM read token {theirs[place]} where the trainer reads {ours[place]}, at place {place} of {len(ours)}"
    reason = (
        f"; its {len(prompt.media)} images must reach both with the same min_pixels and max_pixels"
        if prompt.media
        else ""
    )
    raise SyncError(f"{prompt.source}: {what}{reason}")


def finished_group(prompt: Prompt, answer: Answer, *, decode: Callable[[Ints], str]) -> Group:
    """The finished answers as rollouts, in the order of their seeds.

    The version of a rollout is the oldest that produced any of its tokens: it is never fresher than it says.

    Raises SyncError when vLLM read another prompt than ours, or gave up an answer.
    """
    check_prompt(prompt, answer.prompt_token_ids)
    completions = sorted(answer.outputs, key=lambda completion: completion.index)
    return Group(prompt, tuple(_rollout(prompt, completion, decode) for completion in completions))


def is_mixed(answer: Answer) -> bool:
    """Whether some answer was begun with one version of the weights and finished with another."""
    return any(len(completion.weight_versions or ()) > 1 for completion in answer.outputs)


def _rollout(prompt: Prompt, completion: Completion, decode: Callable[[Ints], str]) -> Rollout:
    reason = _FINISHED.get(completion.finish_reason or "")
    if reason is None or not completion.weight_versions:
        raise SyncError(
            f"{prompt.source}: the rollout engine gave up an answer ({completion.finish_reason or 'no reason'})"
        )
    answer = np.asarray(completion.token_ids, dtype=np.int64)
    length = len(prompt.tokens)
    sampled = np.zeros(length + len(answer), dtype=np.bool_)
    sampled[length:] = True
    logprobs: Floats = np.zeros(len(sampled), dtype=np.float32)
    chosen = zip(completion.token_ids, completion.logprobs, strict=True)
    logprobs[length:] = [of_place[token].logprob for token, of_place in chosen]
    return Rollout(
        tokens=np.concatenate([prompt.tokens, answer]),
        sampled=sampled,
        logprobs=logprobs,
        text=decode(answer),
        finish_reason=reason,
        version=min(int(span.version) for span in completion.weight_versions),
    )
