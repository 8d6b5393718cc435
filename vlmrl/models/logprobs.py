"""Log-probabilities of tokens, without the [T, V] logits.

The head's product, the log-softmax and the gather run slice by slice, and the backward pass recomputes the slices, so
that memory holds one slice. With z = (h W' + b) / temperature, p = softmax(z) and its entropy H,

    d log p[y] / d z = onehot(y) - p          d H / d z = -p (log p + H)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BAN = -100.0
"""Added to the logits of banned tokens before the temperature, like the rollout engine's `logit_bias`."""

SLICE = {"cpu": 2**23, "cuda": 2**25}
"""Maximum number of logits in memory: on CPU as many as its caches hold, on a GPU enough to keep it busy."""


class TokenLogprobs(NamedTuple):
    """Log-probs of the target tokens, and entropies of the distributions that they were sampled from."""

    logprobs: Tensor
    """[T] fp32 (fp64 for fp64 inputs)."""
    entropy: Tensor
    """[T] in nats, of the tempered distribution without the banned tokens."""


class ScoringHead(nn.Linear):
    """A language model's output layer that can also score tokens.

    It is a module, because ZeRO-3 gathers weights when a module is called, in both passes.
    """

    @classmethod
    def adopt(cls, linear: nn.Linear) -> ScoringHead:
        """Change the class of `linear` in place; its parameters, their names and ties stay the same."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        return linear

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        temperature: float = 1.0,
        banned: tuple[int, ...] = (),
        also: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
    ) -> Tensor | TokenLogprobs | tuple[Tensor, Tensor, Tensor]:
        """Without targets, logits [..., V] of hidden [..., D]; with targets [T], `TokenLogprobs` of hidden [T, D].

        `also` is a function of hidden states, weight and bias, whose result [T] comes third. It is called here, because
        ZeRO-3 has the weights only here.
        """
        if targets is None:
            return super().forward(hidden)
        output = token_logprobs(hidden, self.weight, self.bias, targets, temperature=temperature, banned=banned)
        return output if also is None else (*output, also(hidden, self.weight, self.bias))


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    banned: tuple[int, ...] = (),
    slice_size: int | None = None,
) -> TokenLogprobs:
    """Score `targets` [T] under softmax((hidden W' + bias + bans) / temperature), for hidden [T, D] and weight [V, D].

    Gradients of log-probabilities and entropy reach hidden, weight and bias. At most `slice_size` logits (but at least
    a row or a column) exist at a time, by default `SLICE` of the device. Sums are in fp32, or fp64 for fp64 inputs.
    """
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, banned, slice_size or SLICE.get(hidden.device.type, 2**25)
    )
    return TokenLogprobs(logprobs, entropy)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        banned: tuple[int, ...],
        slice_size: int,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        offset = _offset(bias, banned, weight.shape[0], weight.device, exact)
        logprobs = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in slices(len(hidden), slice_size // weight.shape[0]):
            logits = _logits(hidden[rows], weight, offset, temperature, exact)
            normalizer[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - normalizer[rows]
            log_p = logits.sub_(normalizer[rows, None])
            entropy[rows] = -log_p.exp().mul_(log_p).sum(-1)
        # Save the parameter, not its data: ZeRO-3 releases the data here and gathers them again, in place, before the
        # backward pass.
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.banned, ctx.slice_size = temperature, banned, slice_size
        # Without an entropy bonus, the backward pass skips three passes over the logits.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_logprobs, d_entropy = gradients
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        if d_logprobs is None:
            d_logprobs = torch.zeros_like(normalizer)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        offset = _offset(bias, ctx.banned, weight.shape[0], weight.device, normalizer.dtype)
        d_hidden = torch.zeros_like(hidden, dtype=normalizer.dtype) if needs_hidden else None
        d_weight = torch.empty_like(weight) if needs_weight else None
        d_bias = torch.empty_like(bias) if needs_bias else None
        # Slices of the vocabulary: each row of the weight's gradient is then one product over all tokens, and needs no
        # fp32 buffer for a sum.
        for columns in slices(len(weight), ctx.slice_size // max(1, len(hidden))):
            part = None if offset is None else offset[columns]
            log_p = _logits(hidden, weight[columns], part, ctx.temperature, normalizer.dtype).sub_(normalizer[:, None])
            if d_entropy is None:
                d_logits = log_p.exp_().mul_(-d_logprobs[:, None])
            else:
                p = log_p.exp()
                d_logits = log_p.add_(entropy[:, None]).mul_(-d_entropy[:, None]).sub_(d_logprobs[:, None]).mul_(p)
            is_inside = (targets >= columns.start) & (targets < columns.stop)
            inside = is_inside.nonzero(as_tuple=True)[0]
            d_logits[inside, targets[inside] - columns.start] += d_logprobs[inside]
            if ctx.temperature != 1.0:
                d_logits /= ctx.temperature
            if d_bias is not None:
                d_bias[columns] = d_logits.sum(0).to(d_bias.dtype)
            d_logits = d_logits.to(weight.dtype)
            if d_weight is not None:
                d_weight[columns] = d_logits.T @ hidden
            if d_hidden is not None:
                d_hidden += d_logits @ weight[columns]
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, offset: Tensor | None, temperature: float, exact: torch.dtype) -> Tensor:
    logits = (hidden @ weight.T).to(exact)
    if offset is not None:
        logits += offset
    return logits if temperature == 1.0 else logits.div_(temperature)


def _offset(
    bias: Tensor | None, banned: tuple[int, ...], vocabulary: int, device: torch.device, exact: torch.dtype
) -> Tensor | None:
    if bias is None and not banned:
        return None
    offset = torch.zeros(vocabulary, dtype=exact, device=device) if bias is None else bias.detach().to(exact, copy=True)
    offset[list(banned)] += BAN
    return offset


def slices(length: int, step: int) -> Iterator[slice]:
    """Cut `range(length)` into slices of `step` numbers, or of one if the step is less."""
    step = max(1, step)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
