"""What vlmrl adds to vLLM's worker: receiving weights, and proof of what was received.

vLLM mixes `WeightReceiver` into its worker class; the engine reaches its methods by `collective_rpc`. Names start with
`vlmrl_`, because vLLM refuses an extension whose names its worker already has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vlmrl.models.transfer import Reader, Ticket
from vlmrl.models.weights import digest, unpack_bucket
from vlmrl.rollout import adapter_cpu
from vlmrl.rollout import transfer as device_transfer
from vlmrl.rollout.adapter_loader import AdapterUpdate
from vlmrl.rollout.compatibility import missing_in_worker
from vlmrl.rollout.prompt_scores import score_as_sampled
from vlmrl.rollout.readback import Places, Readback
from vlmrl.rollout.reports import Announcement, ReadbackPlan, Report
from vlmrl.system.memory import keep_memory


class WeightReceiver:
    """Methods that vLLM's worker inherits. One update is a `begin`, any number of `load`, `finish`."""

    vllm_config: VllmConfig
    model_runner: Any
    weight_transfer_engine: Any
    vlmrl_update: WeightUpdate | AdapterUpdate | None = None
    vlmrl_adapter_update: type[AdapterUpdate] = AdapterUpdate
    vlmrl_places: dict[str, frozenset[str]]
    vlmrl_pieces: Places
    vlmrl_reader: Reader

    def vlmrl_prepare(self) -> list[str]:
        """Call once, before the first request. Returns what this worker lacks, of which nothing can be asked then."""
        config = self.vllm_config
        lacks = missing_in_worker(
            self, has_adapter=config.lora_config is not None, transfers=config.weight_transfer_config is not None
        )
        if lacks:
            return lacks
        self.vlmrl_places, self.vlmrl_pieces = {}, {}
        self.vlmrl_reader = Reader()
        if self.model_runner.device.type == "cpu":
            keep_memory()
            hold_unused_generators(self.model_runner)
            if self.vllm_config.lora_config is not None:
                for wrapper in self.model_runner.lora_manager._adapter_manager.punica_wrapper_mapping.values():
                    adapter_cpu.use(wrapper)
        return []

    def vlmrl_score_as_sampled(self, temperature: float, banned: list[int]) -> None:
        """Let log-probs of prompts be of the distribution that is sampled from. Call once, before the first request."""
        score_as_sampled(self.model_runner, temperature=temperature, banned=banned)

    def vlmrl_begin(self, plan: ReadbackPlan | None = None) -> None:
        """Start an update of the model; an update that was begun before and not finished is given up.

        With a `plan` the report says what was read back from the layers.
        """
        with set_current_vllm_config(self.vllm_config):
            self._vlmrl_give_up()
            model = self.model_runner.get_model()
            readback = None if plan is None else Readback(model, plan, self.vlmrl_pieces, tied_heads(model))
            self.vlmrl_update = WeightUpdate(model, self.vllm_config, self.vlmrl_places, readback)

    def vlmrl_begin_adapter(self, announced: Announcement) -> None:
        """Start an update of the adapter; an update that was begun before and not finished is given up."""
        with set_current_vllm_config(self.vllm_config):
            self._vlmrl_give_up()
            self.vlmrl_update = self.vlmrl_adapter_update(self.model_runner.lora_manager, announced)

    def _vlmrl_give_up(self) -> None:
        if self.vlmrl_update is not None:
            self.vlmrl_update.close()
            self.vlmrl_update = None

    def vlmrl_load(self, ticket: Ticket) -> None:
        """Load the tensors of one bucket, whose memory is another's when this returns."""
        assert self.vlmrl_update is not None
        with set_current_vllm_config(self.vllm_config):
            self.vlmrl_update.load(unpack_bucket(self.vlmrl_reader.open(ticket)))

    def vlmrl_receive(self, offer: device_transfer.Offer) -> None:
        """Load the tensors of a bucket that comes from GPU to GPU."""
        assert self.vlmrl_update is not None
        with set_current_vllm_config(self.vllm_config):
            device_transfer.receive(self.weight_transfer_engine, self.vlmrl_update, offer)

    def vlmrl_finish(self) -> Report:
        """End the update and report it (of an adapter, as an AdapterReport).

        An update with something to complain of leaves a mixture, which must not be used until the next good one.
        """
        assert self.vlmrl_update is not None
        with set_current_vllm_config(self.vllm_config):
            update, self.vlmrl_update = self.vlmrl_update, None
            return update.complete()


class WeightUpdate:
    """One update of a model under vLLM's layerwise reload, which loads, re-packs and copies in place layer by layer.

    Plain `model.load_weights` would not do: on CPU vLLM re-packs linear weights and frees the originals.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        places: dict[str, frozenset[str]],
        readback: Readback | None = None,
    ) -> None:
        """`places` is filled: the parameters of vLLM's model that each tensor went to when it came alone. Hand it to
        the next update of the same model, which can then load them together. `readback` is one of this update.
        """
        self.model = model
        self.vllm_config = vllm_config
        self.places = places
        self.digests: dict[str, str] = {}
        self.ignored: list[str] = []
        self._readback = readback
        self._tied_heads = list(tied_heads(model))
        initialize_layerwise_reload(model)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str] = digest) -> None:
        """Hand the tensors to vLLM's loader: one by one the first time, for only so does it tell which it did not want.

        Later all together, which takes 57 ms for 129 tensors instead of 90: vLLM walks its whole model in each call.
        A tensor whose places it then does not name is ignored too; one of several that share a place is `missing`.
        """
        named = list(tensors)
        self.digests |= {name: digest_of(name, tensor) for name, tensor in named}
        if all(name in self.places for name, _ in named) and (self._readback is None or self._readback.knows(named)):
            if self._readback is not None:
                self._readback.keep(named)
            taken = self._hand_over(named)
            self.ignored += [name for name, _ in named if not self.places[name] <= taken]
        else:
            for name, tensor in named:
                with nullcontext() if self._readback is None else self._readback.watching(name, tensor):
                    taken = self._hand_over([(name, tensor)])
                if taken:
                    self.places[name] = taken
                else:
                    self.ignored.append(name)
        self._keep_what_waits(named)

    def _keep_what_waits(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy those of the tensors that vLLM holds back until the rest of their layer has come.

        It holds what it was given, views of memory that others are about to write to.
        """
        lent = {tensor.untyped_storage().data_ptr() for _, tensor in named if tensor.numel()}
        for module in self.model.modules():
            for _, arguments in get_layerwise_info(module).loaded_weights:
                for name, value in arguments.arguments.items():
                    if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in lent:
                        arguments.arguments[name] = value.clone()

    def _hand_over(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        """The parameters of vLLM's model that took them."""
        load_weights: Any = self.model.load_weights
        with disable_mtp_completeness_check():
            return frozenset(load_weights(tensors) or ())

    def complete(self) -> Report:
        """End the update and report it."""
        missing = self.missing()
        self.close()
        report: Report = {"digests": self.digests, "ignored": self.ignored, "missing": missing}
        if self._readback is not None and not (self.ignored or missing):
            report["readback"] = self._readback.report()
        return report

    def missing(self) -> list[str]:
        """Modules whose parameters have not all been loaded, with the number of elements that are missing."""
        tied = {id(head) for head in self._tied_heads}
        found = []
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            if info.load_numel_total is None or id(module) in tied or is_deferred_attention_layer(module):
                continue
            # Buffers count in vLLM's own total, but are made by the code and not loaded.
            total = sum(parameter.numel() for parameter in module.parameters(recurse=False)) - _padding(module)
            if info.load_numel < total:
                found.append(f"{name} ({total - info.load_numel} of {total} elements)")
        return found

    @torch.no_grad()
    def close(self) -> None:
        """Make a model again of what has come, be it complete or not."""
        finalize_layerwise_reload(self.model, self.vllm_config.model_config)
        for head in self._tied_heads:
            # A head that shares the embedding's weight is no parameter of its own, so the reload passes it by; but on
            # CPU its matrix product reads a packed copy, which would stay that of the old weights.
            head.quant_method.process_weights_after_loading(head)


def hold_unused_generators(runner: Any) -> None:
    """Keep the random generators of requests whose sample will be thrown away out of that step.

    A prompt that is prefilled in pieces yields a sample with every piece, and only the last one counts. vLLM's model
    runner rewinds the generator of the request after each of the others, in a way that CUDA generators alone can: on
    CPU a request with a seed kills the engine ("CPU Generator does not use offset"). Without its generator the row
    draws from the global one, and nothing needs rewinding.
    """
    sample_tokens = runner.sample_tokens

    def sample(grammar_output: Any) -> Any:
        batch = runner.input_batch
        unused = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        held = {row: batch.generators.pop(row) for row in unused if row in batch.generators}
        try:
            return sample_tokens(grammar_output)
        finally:
            batch.generators.update(held)

    runner.sample_tokens = sample


def tied_heads(model: nn.Module) -> Iterator[ParallelLMHead]:
    """Heads that share their weight with the embedding."""
    modules = list(model.modules())
    embeddings = {
        id(m.weight) for m in modules if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    }
    for module in modules:
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            yield module


def _padding(module: nn.Module) -> int:
    """Elements that vLLM adds to a vocabulary to make it a multiple of 64: no checkpoint has them."""
    if not isinstance(module, VocabParallelEmbedding):
        return 0
    shard = module.shard_indices
    columns = int(module.embedding_dim)
    return int(shard.num_elements_padded - shard.num_org_elements - shard.num_added_elements) * columns
