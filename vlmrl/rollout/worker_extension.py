"""Extension of vLLM's worker that receives weights and reports what it received.

vLLM mixes `WeightReceiver` into its worker class; the engine calls its methods by `collective_rpc`. Names start with
`vlmrl_`, because vLLM refuses an extension with names that its worker already has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vlmrl.models.shared_memory import Reader, Ticket
from vlmrl.models.weight_buckets import digest, unpack_bucket
from vlmrl.rollout import gpu_transfer
from vlmrl.rollout.adapter_loader import AdapterUpdate
from vlmrl.rollout.compatibility import missing_in_worker
from vlmrl.rollout.expert_recorder import ExpertRecorder
from vlmrl.rollout.prompt_scores import score_as_sampled
from vlmrl.rollout.readback import Places, Readback
from vlmrl.rollout.reports import AdapterDescription, ReadbackPlan, Report
from vlmrl.rollout.vllm_patches import (
    apply_adapter_by_row,
    hold_unused_generators,
    make_stage_inputs,
    pack_experts_again,
)
from vlmrl.system.malloc import keep_memory


class WeightReceiver:
    """Methods that vLLM's worker inherits. One update is `begin`, any number of `load`, `finish`."""

    vllm_config: VllmConfig
    model_runner: Any
    weight_transfer_engine: Any
    vlmrl_update: WeightUpdate | AdapterUpdate | None = None
    vlmrl_adapter_update: type[AdapterUpdate] = AdapterUpdate
    vlmrl_places: dict[str, frozenset[str]]
    vlmrl_pieces: Places
    vlmrl_reader: Reader
    vlmrl_experts: ExpertRecorder

    def vlmrl_prepare(self, records_experts: bool = False) -> list[str]:
        """Patch the worker. Call once, before the first request. Returns the names that are missing in this vLLM.

        `records_experts`: responses are to hold the experts of their tokens; on GPUs vLLM sees to that.
        """
        config = self.vllm_config
        absent = missing_in_worker(
            self, has_adapter=config.lora_config is not None, transfers=config.weight_transfer_config is not None
        )
        if absent:
            return absent
        self.vlmrl_places, self.vlmrl_pieces = {}, {}
        self.vlmrl_reader = Reader()
        if self.model_runner.device.type == "cpu":
            keep_memory()
            hold_unused_generators(self.model_runner)
            pack_experts_again(self.model_runner.get_model())
            make_stage_inputs(self.model_runner)
            if records_experts:
                self.vlmrl_experts = ExpertRecorder(self.model_runner, self.model_runner.get_model())
            if self.vllm_config.lora_config is not None:
                for wrapper in self.model_runner.lora_manager._adapter_manager.punica_wrapper_mapping.values():
                    apply_adapter_by_row(wrapper)
        return []

    def vlmrl_take_experts(self, request: str) -> list[tuple[int, list[int], bytes]]:
        """Return the recorded experts of a request's responses as (index, shape, data), and drop them."""
        return [(index, list(rows.shape), rows.tobytes()) for index, rows in self.vlmrl_experts.take(request).items()]

    def vlmrl_score_as_sampled(self, temperature: float, banned: list[int]) -> None:
        """Compute log-probs of prompts in the sampling distribution. Call once, before the first request."""
        score_as_sampled(self.model_runner, temperature=temperature, banned=banned)

    def vlmrl_begin(self, plan: ReadbackPlan | None = None) -> None:
        """Begin an update of the model; an unfinished one is abandoned.

        With a `plan` the report includes what was read back from the layers.
        """
        with set_current_vllm_config(self.vllm_config):
            self._vlmrl_abandon()
            model = self.model_runner.get_model()
            readback = None if plan is None else Readback(model, plan, self.vlmrl_pieces, tied_heads(model))
            has_stages = self.vllm_config.parallel_config.pipeline_parallel_size > 1
            stage = get_pp_group().rank_in_group if has_stages else None
            self.vlmrl_update = WeightUpdate(model, self.vllm_config, self.vlmrl_places, readback, stage=stage)

    def vlmrl_begin_adapter(self, description: AdapterDescription) -> None:
        """Begin an update of the adapter; an unfinished one is abandoned."""
        with set_current_vllm_config(self.vllm_config):
            self._vlmrl_abandon()
            self.vlmrl_update = self.vlmrl_adapter_update(self.model_runner.lora_manager, description)

    def _vlmrl_abandon(self) -> None:
        if self.vlmrl_update is not None:
            self.vlmrl_update.close()
            self.vlmrl_update = None

    def vlmrl_load(self, ticket: Ticket) -> None:
        """Load the tensors of one bucket, whose memory may be reused when this returns."""
        assert self.vlmrl_update is not None
        with set_current_vllm_config(self.vllm_config):
            self.vlmrl_update.load(unpack_bucket(self.vlmrl_reader.open(ticket)))

    def vlmrl_receive(self, offer: gpu_transfer.Offer) -> None:
        """Load the tensors of a bucket from GPU to GPU."""
        assert self.vlmrl_update is not None
        with set_current_vllm_config(self.vllm_config):
            gpu_transfer.receive(self.weight_transfer_engine, self.vlmrl_update, offer)

    def vlmrl_finish(self) -> Report:
        """Finish the update and report it (for an adapter with an AdapterReport).

        A failed update leaves a mixture of weights, which must not be used until an update succeeds.
        """
        assert self.vlmrl_update is not None
        with set_current_vllm_config(self.vllm_config):
            update, self.vlmrl_update = self.vlmrl_update, None
            return update.complete()


class WeightUpdate:
    """One update of a model with vLLM's layerwise reload, which loads, re-packs and copies in place layer by layer.

    Plain `model.load_weights` is not enough: on CPU vLLM re-packs linear weights and frees the originals.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        places: dict[str, frozenset[str]],
        readback: Readback | None = None,
        *,
        stage: int | None = None,
    ) -> None:
        """Begin the update.

        Args:
            places: filled with the parameters of vLLM's model that each tensor went to when it was loaded alone, none
                for those that it ignored. The next update of the same model needs them to load tensors together.
            readback: that of this update.
            stage: number of the model's stage in a pipeline; None for a whole model.
        """
        self.model = model
        self.vllm_config = vllm_config
        self.places = places
        self.digests: dict[str, str] = {}
        self.ignored: list[str] = []
        self._readback = readback
        self._stage = stage
        self._tied_heads = list(tied_heads(model))
        initialize_layerwise_reload(model)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], digest_of: Callable[[str, Tensor], str] = digest) -> None:
        """Pass the tensors to vLLM's loader: one by one the first time, because only then does it report which it
        ignored.

        Later all together, which takes 57 ms for 129 tensors instead of 90: vLLM walks its whole model in each call.
        A tensor is then ignored if the loader does not name its places; one of several that share a place is `missing`.
        """
        named = list(tensors)
        self.digests |= {name: digest_of(name, tensor) for name, tensor in named}
        if all(name in self.places for name, _ in named) and (
            self._readback is None or self._readback.has_places(named)
        ):
            if self._readback is not None:
                self._readback.record(named)
            loaded = self._load_into_model(named)
            self.ignored += [n for n, _ in named if not self.places[n] or not self.places[n] <= loaded]
        else:
            for name, tensor in named:
                with nullcontext() if self._readback is None else self._readback.trace_loading(name, tensor):
                    loaded = self._load_into_model([(name, tensor)])
                # Nowhere: this stage of the pipeline lacks the layer, or the whole model does.
                self.places[name] = loaded
                if not loaded:
                    self.ignored.append(name)
        self._copy_deferred(named)

    def _copy_deferred(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors that vLLM holds back until the rest of their layer arrives.

        It holds views of memory that is about to be overwritten.
        """
        shared = {tensor.untyped_storage().data_ptr() for _, tensor in named if tensor.numel()}
        for module in self.model.modules():
            for _, arguments in get_layerwise_info(module).loaded_weights:
                for name, value in arguments.arguments.items():
                    if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in shared:
                        arguments.arguments[name] = value.clone()

    def _load_into_model(self, tensors: list[tuple[str, Tensor]]) -> frozenset[str]:
        """Load the tensors; returns the parameters of vLLM's model that received them."""
        load_weights: Any = self.model.load_weights
        with disable_mtp_completeness_check():
            return frozenset(load_weights(tensors) or ())

    def complete(self) -> Report:
        """Finish the update and report it."""
        missing = self.missing()
        self.close()
        report: Report = {"digests": self.digests, "ignored": self.ignored, "missing": missing}
        if self._stage is not None:
            report["stage"] = self._stage
        if self._readback is not None and not missing and (self._stage is not None or not self.ignored):
            report["readback"] = self._readback.report(elsewhere=self.ignored)
        return report

    def missing(self) -> list[str]:
        """Modules whose parameters were not all loaded, with the number of missing elements."""
        tied = {id(head) for head in self._tied_heads}
        incomplete = []
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            if info.load_numel_total is None or id(module) in tied or is_deferred_attention_layer(module):
                continue
            # vLLM's own total includes buffers, which the code creates and nobody loads.
            total = sum(parameter.numel() for parameter in module.parameters(recurse=False)) - _padding(module)
            if info.load_numel < total:
                incomplete.append(f"{name} ({total - info.load_numel} of {total} elements)")
        return incomplete

    @torch.no_grad()
    def close(self) -> None:
        """End vLLM's reload with the tensors that have arrived, even if some are missing."""
        finalize_layerwise_reload(self.model, self.vllm_config.model_config)
        for head in self._tied_heads:
            # The reload skips a head that shares the embedding's weight, because it has no parameter; but on
            # CPU its matrix product reads a packed copy, which would keep the old weights.
            head.quant_method.process_weights_after_loading(head)


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
