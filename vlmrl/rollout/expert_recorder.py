"""Record the experts that an engine on CPUs chooses for each token. On GPUs vLLM does so itself."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor, nn

_MAX_REQUESTS = 4096
"""Requests whose experts are kept until they are taken; those of log-probs never are."""


class ExpertRecorder:
    """The experts of all requests of one worker, from vLLM's older model runner.

    A token whose KV cache came from another request was not computed, and has none.
    """

    def __init__(self, runner: Any, model: nn.Module) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        layers = [module for module in model.modules() if isinstance(module, MoERunner)]
        self._num_layers = len(layers)
        self._runner, self._prepare = runner, runner._prepare_inputs
        self._spans: list[tuple[str, int, int]] = []
        self._by_request: OrderedDict[str, NDArray[np.int16]] = OrderedDict()
        runner._prepare_inputs = self._note_batch
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._record, number))

    def take(self, name: str) -> dict[int, NDArray[np.int16]]:
        """Return the experts of a request's responses by their index, [R, L, K]; -1 where there are none."""
        pattern = re.compile(rf"(?:(\d+)_)?{re.escape(name)}-[0-9a-f]{{8}}")
        found = {key: match for key in self._by_request if (match := pattern.fullmatch(key))}
        return {int(match[1] or 0): self._by_request.pop(key) for key, match in found.items()}

    def _note_batch(self, scheduled: Any, num_tokens: Sequence[int]) -> Any:
        batch = self._runner.input_batch
        starts = batch.num_computed_tokens_cpu
        self._spans = [(name, int(starts[i]), int(num_tokens[i])) for i, name in enumerate(batch.req_ids)]
        return self._prepare(scheduled, num_tokens)

    def _record(self, layer: int, experts: Tensor) -> None:
        rows, first = experts.numpy(), 0
        for name, start, count in self._spans:
            self._rows(name, start + count, rows.shape[1])[start : start + count, layer] = rows[first : first + count]
            first += count
        if layer == self._num_layers - 1:
            self._spans = []  # passes without requests, which warm vLLM up, follow no batch

    def _rows(self, name: str, length: int, width: int) -> NDArray[np.int16]:
        rows = self._by_request.get(name)
        if rows is None or len(rows) < length:
            longer = np.full((2 * length, self._num_layers, width), -1, dtype=np.int16)
            if rows is not None:
                longer[: len(rows)] = rows
            self._by_request[name] = rows = longer
            if len(self._by_request) > _MAX_REQUESTS:
                self._by_request.popitem(last=False)
        return rows


async def attach_experts(call: Callable[..., Awaitable[list[Any]]], output: Any) -> None:
    """Give each response of vLLM's output the experts that the workers recorded, if vLLM has not done so.

    A prompt's experts are those of any response: only one of them computed it.
    """
    if any(completion.routed_experts is not None for completion in output.outputs):
        return
    # vLLM's messages do not keep arrays within other objects.
    taken = (await call("vlmrl_take_experts", output.request_id))[0]
    by_index = {index: np.frombuffer(data, np.int16).reshape(shape).copy() for index, shape, data in taken}
    length = len(output.prompt_token_ids)
    for rows in by_index.values():
        for others in by_index.values():
            rows[:length] = np.where(rows[:length] >= 0, rows[:length], others[:length])
    for completion in output.outputs:
        if completion.index in by_index:
            completion.routed_experts = by_index[completion.index][: length + len(completion.token_ids) - 1]
