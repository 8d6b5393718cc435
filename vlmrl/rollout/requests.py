"""Convert prompts to vLLM's requests, and its outputs to groups, without importing vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vlmrl.errors import SyncError
from vlmrl.types import Bools, FinishReason, Floats, Group, Ints, Media, Prompt, Rollout, Sampling, Segment, Turn
from vlmrl.video_size import VideoSize

ADAPTER_ID = 1
"""vLLM's id of the one adapter that an engine may have."""

_FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class Span(Protocol):
    """Tokens of a response that one version of the weights produced (vLLM's WeightVersionSpan)."""

    version: str
    start: int
    """Index of its first token in the response."""
    end: int
    """Index behind its last token."""


class Completion(Protocol):
    """One response (vLLM's CompletionOutput)."""

    index: int
    token_ids: Sequence[int]
    logprobs: Any
    """For each token a mapping of it to an object with `logprob`."""
    finish_reason: str | None
    weight_versions: Sequence[Span] | None
    routed_experts: NDArray[np.integer] | None
    """[T - 1, L, K] of prompt and response, if the engine was asked for them: the last token was never an input."""


class Output(Protocol):
    """All responses to one prompt (vLLM's RequestOutput)."""

    prompt_token_ids: Sequence[int] | None
    prompt_logprobs: Sequence[Any] | None
    """If requested: None for the first token, then for each token a mapping of it to an object with `logprob`."""
    outputs: Sequence[Completion]


def engine_prompt(prompt: Prompt, engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's TokensPrompt. Fetches the pixels, which may block: do not call it in an event loop if there are images."""
    request: dict[str, Any] = {"prompt_token_ids": prompt.request.tolist()}
    if prompt.media:
        by_kind: dict[str, list[Media]] = {"image": [], "video": []}
        for media in prompt.media:
            by_kind["video" if isinstance(media.size, VideoSize) else "image"].append(media)
        items = {kind: media for kind, media in by_kind.items() if media}
        request["multi_modal_data"] = {kind: [_pixels(item) for item in media] for kind, media in items.items()}
        # vLLM identifies images by our content hash: it does not hash the pixels again, and encodes equal images once.
        request["multi_modal_uuids"] = {kind: [item.hash for item in media] for kind, media in items.items()}
        request["mm_processor_kwargs"] = dict(engine_kwargs)
    return request


def _pixels(media: Media) -> Any:
    """Return an image, or the frames of a video with their times, as vLLM takes them."""
    from PIL import Image

    pixels, size = media.fetch(), media.size
    if not isinstance(size, VideoSize):
        return Image.fromarray(pixels)
    return pixels, {
        "fps": size.fps,
        "frames_indices": list(size.indices),
        "total_num_frames": size.total,
        "duration": size.total / size.fps,
        "video_backend": "pyav",
        "do_sample_frames": False,
    }


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
    } | ({"stop": list(sampling.stop), "detokenize": True} if sampling.stop else {})


def as_prompt(prompt: Prompt, segment: Segment, request: Ints) -> Prompt:
    """Return a segment of a response as a prompt, for scoring tokens that exist already.

    `request` are its tokens with one placeholder per image.
    """
    return replace(prompt, tokens=segment.tokens, request=request, media=segment.media)


def scoring_parameters() -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for log-probs of the prompt itself. vLLM always generates at least one
    token."""
    return {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}


def prompt_logprobs(prompt: Prompt, output: Output, *, sampled: Bools) -> Floats:
    """Return log-probs of the `sampled` tokens of a prompt, [T]; 0 elsewhere.

    Raises:
        SyncError: vLLM read another prompt than ours, or did not score it.
    """
    check_prompt(prompt, output.prompt_token_ids)
    logprobs: Floats = np.zeros(len(prompt.tokens), dtype=np.float32)
    scores = output.prompt_logprobs or ()
    if len(scores) != len(logprobs):
        raise SyncError(f"{prompt.source}: vLLM scored {len(scores)} of the {len(logprobs)} requested tokens")
    positions = np.flatnonzero(sampled)
    logprobs[positions] = [scores[t][int(prompt.tokens[t])].logprob for t in positions.tolist()]
    return logprobs


def check_prompt(prompt: Prompt, token_ids: Sequence[int] | None) -> None:
    """Raise SyncError unless vLLM read the tokens that the trainer will read.

    They differ when the two sides resize images differently, or when images were lost.
    """
    ours, theirs = prompt.tokens, np.asarray(token_ids if token_ids is not None else (), dtype=np.int64)
    if np.array_equal(ours, theirs):
        return
    if len(ours) != len(theirs):
        difference = f"vLLM read {len(theirs)} tokens where the trainer reads {len(ours)}"
    else:
        t = int(np.flatnonzero(ours != theirs)[0])
        difference = f"vLLM read token {theirs[t]} where the trainer reads {ours[t]}, at position {t} of {len(ours)}"
    hint = (
        f"; its {len(prompt.media)} images must reach both with the same min_pixels and max_pixels"
        if prompt.media
        else ""
    )
    raise SyncError(f"{prompt.source}: {difference}{hint}")


def to_group(prompt: Prompt, output: Output, decode: Callable[[Ints], str], has_experts: bool = False) -> Group:
    """Convert finished responses to rollouts, in the order of their seeds.

    Raises:
        SyncError: vLLM read another prompt than ours, or aborted a response, or with `has_experts` did not record the
            experts of each token.
    """
    check_prompt(prompt, output.prompt_token_ids)
    completions = sorted(output.outputs, key=lambda completion: completion.index)
    return Group(prompt, tuple(_rollout(prompt, item, decode, has_experts) for item in completions))


def _versions(prompt: Prompt, completion: Completion) -> Ints:
    """Return the version of each token of prompt and response, [T]; -1 on the prompt."""
    start = len(prompt.tokens)
    versions = np.full(start + len(completion.token_ids), -1, dtype=np.int64)
    for span in completion.weight_versions or ():
        versions[start + span.start : start + span.end] = int(span.version)
    if (versions[start:] < 0).any():
        raise SyncError(f"{prompt.source}: vLLM does not say which weights sampled every token of a response")
    return versions


def is_mixed(output: Output) -> bool:
    """Whether more than one version of the weights produced some response."""
    return any(len(completion.weight_versions or ()) > 1 for completion in output.outputs)


def _rollout(prompt: Prompt, completion: Completion, decode: Callable[[Ints], str], has_experts: bool) -> Rollout:
    reason = _FINISHED.get(completion.finish_reason or "")
    if reason is None or not completion.weight_versions:
        raise SyncError(
            f"{prompt.source}: the rollout engine aborted a response ({completion.finish_reason or 'no reason'})"
        )
    response = np.asarray(completion.token_ids, dtype=np.int64)
    length = len(prompt.tokens)
    sampled = np.zeros(length + len(response), dtype=np.bool_)
    sampled[length:] = True
    logprobs: Floats = np.zeros(len(sampled), dtype=np.float32)
    by_position = zip(completion.token_ids, completion.logprobs, strict=True)
    logprobs[length:] = [scores[token].logprob for token, scores in by_position]
    turns = (Turn(length, length + len(response)),) if len(response) else ()
    tokens = np.concatenate([prompt.tokens, response])
    versions = _versions(prompt, completion)
    experts = completion.routed_experts if has_experts else None
    if has_experts and (experts is None or len(experts) != len(tokens) - 1):
        found = "no" if experts is None else len(experts)
        raise SyncError(f"{prompt.source}: vLLM recorded the experts of {found} tokens instead of {len(tokens) - 1}")
    segment = Segment(tokens, sampled, logprobs, versions, turns, prompt.media, experts)
    return Rollout((segment,), decode(response), reason)
