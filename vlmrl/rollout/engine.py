"""The rollout engine: vLLM's AsyncLLM with token ids in and out, and verified weight updates."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlmrl import plugins, startup
from vlmrl.data.image_tokens import collapse
from vlmrl.errors import ClusterError, DataError, DiedError, SyncError
from vlmrl.models.adapter_plan import AdapterPlan, adapter_fingerprint
from vlmrl.models.weight_buckets import fingerprint
from vlmrl.rollout import requests
from vlmrl.rollout.capacity import Limits
from vlmrl.rollout.compatibility import format_missing
from vlmrl.rollout.engine_checks import check_device, check_model
from vlmrl.rollout.expert_recorder import attach_experts
from vlmrl.rollout.inbox import Inbox
from vlmrl.rollout.launch import OUTPUT_DELAY_S, Launch, engine_arguments, one_line
from vlmrl.rollout.reports import (
    HeldAdapter,
    ReadbackPlan,
    ReadbackReport,
    describe_adapter,
    find_adapter_problem,
    find_problem,
)
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Floats, Group, Prompt, Sampling, Segment

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

SLEEP_TAGS = frozenset({"weights", "kv_cache"})
"""vLLM's names of the memory that sleep frees."""
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class RolloutEngine(Inbox):
    """One vLLM engine. Call all its methods from one event loop.

    Log-probs of responses are those of the distribution that was sampled from: bans applied, then divided by the
    temperature. With `top_p` below 1 they are the model's own instead (no bans, temperature 1), because a trainer
    cannot reproduce the nucleus.

    Weights change between `begin_update` and `finish_update`. Requests in flight pause there and resume afterwards;
    their KV cache is recomputed, and each token carries the version that sampled it. After a failed update the engine
    refuses to generate, with the reason, until an update succeeds; its `version` does not change.

    An engine with an adapter generates with base and adapter or with the base only, as each request specifies. After an
    update of the base it has no adapter until the next one is synced.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Start nothing yet."""
        assert settings.adapter is None or settings.adapter.fits_engine
        super().__init__(settings.name, settings.vllm)
        self.version = 0
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._launch = Launch(f"{settings.name} ({settings.model})")
        self._counter = itertools.count()
        self._running: dict[str, bool] = {}
        """Request in flight -> whether it uses the adapter."""
        self._num_tokens = self._num_groups = self._num_mixed = 0
        self._pending: int | None = None
        """The version of the update in progress."""
        self._broken: str | None = None
        """Reason to refuse generation; None without one."""
        self._digests: dict[str, str] = {}
        self._plan = settings.adapter
        self._adapter: HeldAdapter | None = None
        self._updated_adapter: AdapterPlan | None = None
        """The adapter that the update in progress brings; None: it brings the base."""
        self._base_is_complete = True
        self._readback: list[ReadbackReport] = []
        """Reports of the workers after the last update of the model."""
        self._asleep: frozenset[str] = frozenset()
        """The memory that has been freed."""
        self._limits: Limits | None = None

    @cached_property
    def _processor(self) -> plugins.Processor:
        startup.prepare()
        settings = self._settings
        return plugins.processor_of(settings.model, settings.columns, trust_remote_code=settings.trust_remote_code)

    # ---- start, stop, sleep

    async def start(self) -> None:
        """Start vLLM and wait until it accepts requests.

        Raises:
            ClusterError: vLLM does not start, or not within `vllm.start_timeout_s`.
            ConfigError: the model does not exist, or vLLM cannot hold it or its adapter as the settings say.
        """
        check_device(adapter=self._plan, dtype=self._settings.dtype)
        if Path(self._settings.model).is_dir():
            startup.work_offline()
        check_model(self._settings, lambda: self._processor)
        self._llm = await self._launch.start(self.arguments, timeout_s=self._vllm.start_timeout_s)
        scheduler = self._llm.vllm_config.scheduler_config
        self._limits = Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        reports = await self._call("vlmrl_prepare", self._settings.returns_experts)
        if absent := sorted({name for names in reports for name in names}):
            await self.shutdown()
            problem = format_missing(absent, on_gpu=torch.cuda.is_available())
            raise ClusterError(f"rollout engine {self.name}: {problem}")
        temperature = self._settings.temperature
        if temperature is not None and self._settings.top_p == 1.0:
            await self._call("vlmrl_score_as_sampled", temperature, list(self._processor.banned_tokens))
        await self._llm.update_weight_version(str(self.version))

    async def shutdown(self) -> None:
        """Stop vLLM and wait until its processes have ended. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await self._launch.stop(llm)

    async def check(self) -> None:
        """Raise DiedError if vLLM has died."""
        if self._started().errored:
            raise await self._death()

    async def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache (needs `vllm.enable_sleep`). Does nothing on CPU."""
        if self._vllm.enable_sleep and self._asleep != SLEEP_TAGS:
            # Weights move to pinned host memory, the KV cache is dropped; what sleeps already does not change.
            await self._core(self._started().sleep(level=1, mode="keep"))
            self._asleep = SLEEP_TAGS

    async def wake(self, tags: Iterable[str] = SLEEP_TAGS) -> None:
        """Allocate the memory of the weights, of the KV cache, or of both again. Generation needs both."""
        if asleep := sorted(self._asleep.intersection(tags)):
            await self._core(self._started().wake_up(tags=asleep))
            self._asleep = self._asleep.difference(asleep)

    async def status(self) -> dict[str, Any]:
        """Version, adapter, counters and limits of the engine, as plain values."""
        return {
            "name": self.name,
            "version": self.version,
            "fingerprint": fingerprint(self._digests) if self._digests else None,
            "adapter": None if self._adapter is None else self._adapter._asdict(),
            "num_running": len(self._running),
            "num_groups": self._num_groups,
            "num_mixed_groups": self._num_mixed,
            "num_tokens": self._num_tokens,
            "limits": self._limits,
            "is_asleep": bool(self._asleep),
            "broken": self._broken,
        }

    # ---- responses

    async def generate(self, prompt: Prompt, sampling: Sampling, *, adapter: bool = True) -> Group:
        """Generate `sampling.n` responses to one prompt, as one request: its images are processed and prefilled once.

        An engine with an adapter applies it, or with `adapter` False generates with the base only.

        Raises:
            SyncError: vLLM read other tokens than `prompt.tokens`, an update of the weights failed meanwhile, or the
                engine has no adapter to apply.
            DataError: vLLM refuses the prompt.
            ClusterError: the engine has died.
        """
        tools = self._processor
        parameters = requests.sampling_parameters(
            sampling, index=prompt.index, eos_token_ids=tools.eos_token_ids, banned_tokens=tools.banned_tokens
        )
        output = await self._request(prompt, parameters, adapter=adapter)
        if self._settings.returns_experts:
            await attach_experts(self._call, output)
        group = requests.to_group(prompt, output, tools.decode, self._settings.returns_experts)
        self._num_groups += 1
        self._num_mixed += requests.is_mixed(output)
        self._num_tokens += sum(rollout.num_sampled for rollout in group.rollouts)
        return group

    async def respond(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Return the responses of a training step or an evaluation to one prompt. Raises the errors of `generate`."""
        return await self.generate(prompt, sampling)

    async def score(self, group: Group, *, adapter: bool = True) -> list[Floats]:
        """Return log-probs of existing responses: one [T] per segment, 0 where not sampled.

        They are of the distribution that is sampled from at the engine's `temperature`, or without one the model's own
        (no bans, temperature 1), and nothing of them comes from the prefix cache. vLLM scores a response only if it
        leaves room for one more token. Raises the errors of `generate`.
        """
        rows = (self._score(group.prompt, segment, adapter=adapter) for segment in group.segments)
        return list(await asyncio.gather(*rows))

    async def _score(self, prompt: Prompt, segment: Segment, *, adapter: bool) -> Floats:
        extended = requests.as_prompt(prompt, segment, collapse(segment.tokens, segment.media, self._processor))
        output = await self._request(extended, requests.scoring_parameters(), adapter=adapter, priority=-1)
        return requests.prompt_logprobs(extended, output, sampled=segment.sampled)

    async def _request(
        self, prompt: Prompt, parameters: dict[str, Any], *, adapter: bool, priority: int = 0
    ) -> RequestOutput:
        """Send one request and return vLLM's final output; low priorities go first. Raises the errors of `generate`."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self._started()
        adapter = adapter and self._plan is not None
        build = partial(requests.engine_prompt, prompt, self._processor.engine_kwargs)
        request = await asyncio.to_thread(build) if prompt.media else build()
        final = SamplingParams(**parameters, output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"{prompt.index}-{next(self._counter)}"
        self._check_weights(adapter=adapter)
        lora = self._lora_request() if adapter else None
        self._running[name] = adapter
        last: RequestOutput | None = None
        try:
            async for output in llm.generate(request, final, name, lora_request=lora, priority=priority):
                last = output
        except EngineDeadError as error:
            raise await self._death() from error
        except (ValueError, VLLMError) as error:  # the request is too long, has too many images, ...
            raise DataError(f"{prompt.source}: vLLM refused the prompt: {one_line(error)}") from error
        finally:
            del self._running[name]
        self._check_weights(adapter=adapter)
        if last is None:
            raise ClusterError(f"rollout engine {self.name} returned no response to {prompt.source}")
        return last

    # ---- weights

    async def begin_update(self, version: int, *, adapter: bool = False, readback: ReadbackPlan | None = None) -> None:
        """Pause generation and prepare for the weights of `version`: those of the model without adapters, or those of
        its adapter. An update that has not finished is abandoned.

        With `readback` the layers of the model are read back before the update ends; those of an adapter always are.

        Raises:
            SyncError: the update is of an adapter, and the engine has no room for one or no complete base.
        """
        llm = self._started()
        if adapter and self._plan is None:
            raise SyncError(f"rollout engine {self.name} was sent an adapter but was started without room for one")
        if adapter and not self._base_is_complete:
            raise SyncError(
                f"rollout engine {self.name} was sent an adapter but has no complete base: "
                f"{self._broken}; sync the base first"
            )
        self._pending, self._updated_adapter = version, self._plan if adapter else None
        self._release_all()
        # Half an update must not generate anything; only `finish_update` clears this.
        self._broken = f"the {'adapter' if adapter else 'weights'} of version {version} have not all arrived"
        await self._core(llm.pause_generation(mode="keep", clear_cache=False))
        if self._updated_adapter is not None:
            await self._call("vlmrl_begin_adapter", describe_adapter(self._updated_adapter))
        else:
            self._base_is_complete, self._adapter = False, None
            await self._call("vlmrl_begin", readback)

    async def finish_update(self, *, vision_changed: bool) -> str:
        """Finish the update, drop everything computed from the old weights, and resume generation.

        Args:
            vision_changed: vision tower or projector may have changed. The engine also compares their digests; adapters
                never change them.

        Returns:
            The fingerprint of the tensors that the workers received and loaded (`models.weight_buckets.fingerprint`),
            or for an adapter of those that their layers hold (`models.adapter_plan.adapter_fingerprint`).

        Raises:
            SyncError: vLLM's model ignored a tensor or lacks one, or its layers hold other weights or another adapter
                than were sent. The engine then refuses to generate until a complete update, and its version does not
                change.
        """
        llm, version = self._started(), self._require_update()
        self._release_all()
        reports: list[Any] = await self._call("vlmrl_finish")
        plan = self._updated_adapter
        problem = find_problem(reports) if plan is None else find_adapter_problem(reports, plan.scaling)
        if problem is not None:
            raise await self._fail_update(version, problem)
        digests: dict[str, str] = reports[0]["digests"]
        await self._reset_prefix_cache()
        if plan is not None:
            loaded = adapter_fingerprint(digests, reports[0]["factor"] * plan.scaling)
            self._adapter = HeldAdapter(version, loaded)
        else:
            loaded = fingerprint(digests)
            if vision_changed or self._vision_differs(digests):
                await self._reset_encoder_cache()
            self._digests, self._base_is_complete = digests, True
            self._readback = [report["readback"] for report in reports if "readback" in report]
        await self._core(llm.update_weight_version(str(version)))
        self.version, self._pending, self._broken = version, None, None
        if self._adapter is None:  # requests for the adapter cannot resume on a new base
            await llm.abort([name for name, adapter in self._running.items() if adapter])
        if not self._asleep:  # asleep, it resumes when its KV cache wakes
            await self._core(llm.resume_generation())
        return loaded

    async def readback(self) -> list[ReadbackReport]:
        """Reports of each worker after the last update of the model; [] if nothing was read back."""
        return self._readback

    async def _reset_prefix_cache(self) -> None:
        """Drop the KV cache of the old weights, also that of requests in flight."""
        await self._core(self._started().reset_prefix_cache(reset_running_requests=True))

    async def _reset_encoder_cache(self) -> None:
        """Drop image embeddings: they are cached by content hash, so those of the old tower would never expire."""
        await self._core(self._started().reset_encoder_cache())

    def _vision_differs(self, digests: dict[str, str]) -> bool:
        vision = (n for n in digests.keys() | self._digests.keys() if self._processor.parameter_group(n) != "language")
        return any(digests.get(name) != self._digests.get(name) for name in vision)

    # ---- internals

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's AsyncEngineArgs."""
        settings = self._settings
        return {
            "model": settings.model,
            "dtype": _DTYPES.get(settings.dtype, settings.dtype),
            "max_model_len": settings.max_model_len,
            "trust_remote_code": settings.trust_remote_code,
        } | engine_arguments(
            vllm=settings.vllm,
            max_images=settings.max_images or settings.columns.max_images_per_prompt,
            columns=settings.columns,
            processor=self._processor,
            top_p=settings.top_p,
            adapter=settings.adapter,
            returns_experts=settings.returns_experts,
            demand=settings.demand,
        )

    def _started(self) -> AsyncLLM:
        if self._llm is None:
            raise ClusterError(f"rollout engine {self.name} is not running")
        return self._llm

    def _check_weights(self, *, adapter: bool) -> None:
        """Raise SyncError after a failed update, and for a request that needs an adapter when there is none.

        During an update requests may queue up: vLLM holds them back.
        """
        if self._broken is not None and self._pending is None:
            raise SyncError(self._broken)
        if adapter and self._adapter is None:
            raise SyncError(
                f"rollout engine {self.name} has no adapter on its base of version {self.version}: sync one first"
            )

    def _lora_request(self) -> LoRARequest:
        """vLLM's request for the adapter."""
        from vllm.lora.request import LoRARequest

        assert self._adapter is not None
        # The path does not exist, and vLLM does not open it: the adapter is loaded already. But the path is part of the
        # key of cached prefixes, so those of another version are never used.
        return LoRARequest("vlmrl", requests.ADAPTER_ID, f"/vlmrl/adapter/{self._adapter.version}")

    def _require_update(self) -> int:
        if self._pending is None:
            raise SyncError(f"rollout engine {self.name} was sent weights outside of an update")
        return self._pending

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's WeightReceiver. After an error the engine refuses to generate."""
        try:
            results: list[Any] = await self._core(self._started().collective_rpc(method, args=arguments))
        except DiedError:
            raise
        except Exception as error:  # vLLM sends the worker's exception as text
            raise await self._fail_update(self._pending, one_line(error)) from error
        return results

    async def _fail_update(self, version: int | None, problem: str) -> SyncError:
        """Refuse to generate from now on, abort all requests, and return the error to raise."""
        self._pending, self._adapter = None, None
        self._broken = f"sync of version {version} to rollout engine {self.name} failed: {problem}"
        await self._started().abort(list(self._running))
        return SyncError(self._broken)

    async def _death(self) -> DiedError:
        await asyncio.sleep(OUTPUT_DELAY_S)
        return DiedError(f"rollout engine {self.name} {self._launch.death()}")
