"""The rollout engine: vLLM's AsyncLLM, token ids in and token ids out, and weights that provably arrived."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlmrl import plugins, startup
from vlmrl.errors import ClusterError, DataError, DiedError, SyncError
from vlmrl.models.adapter_plan import AdapterPlan, adapter_fingerprint
from vlmrl.models.weights import fingerprint
from vlmrl.rollout import requests
from vlmrl.rollout.capacity import Limits
from vlmrl.rollout.compatibility import line
from vlmrl.rollout.inbox import Inbox
from vlmrl.rollout.launch import LAST_WORDS_S, Launch, check_base, check_device, engine_arguments, one_line
from vlmrl.rollout.reports import (
    HeldAdapter,
    ReadbackPlan,
    ReadbackReport,
    announcement,
    problem_of,
    problem_of_adapter,
)
from vlmrl.rollout.sampling import Sampling
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Floats, Group, Prompt, Rollout

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

SLEEPERS = frozenset({"weights", "kv_cache"})
"""vLLM's names of what sleeps."""
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class RolloutEngine(Inbox):
    """One vLLM engine. All its methods belong to one event loop.

    Log-probs of answers are those of the distribution that was sampled from: bans applied, then divided by the
    temperature. With `top_p` below 1 they are the model's own instead (no bans, temperature 1), because no trainer can
    reproduce the nucleus.

    Weights change between `begin_update` and `finish_update`. Requests in flight pause there and go on afterwards; what
    they had computed is computed again, and a group whose answers saw two versions carries the older. When an update
    goes wrong the engine refuses to generate, with the reason, until one goes right; its `version` stays what it was.

    An engine with an adapter answers as base and adapter together or as the base alone, request by request. It has its
    adapter once one was synced on the base that it holds: a new base waits for its adapter.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Starts nothing yet."""
        assert settings.adapter is None or settings.adapter.fits_engine
        super().__init__(settings.name, settings.vllm)
        self.version = 0
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._launch = Launch(f"{settings.name} ({settings.model})")
        self._counter = itertools.count()
        self._running: dict[str, bool] = {}
        """The requests under way, and whether each is for the adapter."""
        self._num_tokens = self._num_groups = self._num_mixed = 0
        self._pending: int | None = None
        """The version of the update that has begun."""
        self._broken: str | None = None
        self._digests: dict[str, str] = {}
        self._plan = settings.adapter
        self._adapter: HeldAdapter | None = None
        self._coming: AdapterPlan | None = None
        """What the update that has begun is of; None: of the base."""
        self._base_is_whole = True
        self._readback: list[ReadbackReport] = []
        """What the workers read back after the last update of the model."""
        self._asleep: frozenset[str] = frozenset()
        """What has given up its memory."""
        self._limits: Limits | None = None

    @cached_property
    def _processor(self) -> plugins.Processor:
        startup.prepare()
        given = self._settings
        return plugins.processor_of(given.model, given.columns, trust_remote_code=given.trust_remote_code)

    # ---- life

    async def start(self) -> None:
        """Start vLLM and wait until it serves.

        Raises ClusterError when vLLM does not start, for whatever reason, or not within `vllm.start_timeout_s`;
        ConfigError when the model is not there, or vLLM cannot hold it in 4 bits (`vllm.qlora_base`) or cannot apply
        its adapter in fp32.
        """
        check_base(self._vllm)
        check_device(adapter=self._plan, dtype=self._settings.dtype)
        if Path(self._settings.model).is_dir():
            os.environ["HF_HUB_OFFLINE"] = "1"
        _ = self._processor  # a model that is not there is found before anything is started
        self._llm = await self._launch.start(self.arguments, timeout_s=self._vllm.start_timeout_s)
        scheduler = self._llm.vllm_config.scheduler_config
        self._limits = Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        lacks = sorted({lack for of_worker in await self._call("vlmrl_prepare") for lack in of_worker})
        if lacks:
            await self.shutdown()
            raise ClusterError(f"rollout engine {self.name}: {line(lacks, on_gpu=torch.cuda.is_available())}")
        temperature = self._settings.temperature
        if temperature is not None and self._settings.top_p == 1.0:
            await self._call("vlmrl_score_as_sampled", temperature, list(self._processor.banned_tokens))
        await self._llm.update_weight_version(str(self.version))

    async def shutdown(self) -> None:
        """Stop vLLM and wait until its processes are gone. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await self._launch.stop(llm)

    async def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache (needs `vllm.enable_sleep`). On CPU nothing happens."""
        if self._vllm.enable_sleep and self._asleep != SLEEPERS:
            # Weights go to pinned host memory, the KV cache is dropped; what already sleeps is left as it is.
            await self._started().sleep(level=1, mode="keep")
            self._asleep = SLEEPERS

    async def wake(self, what: Iterable[str] = SLEEPERS) -> None:
        """Take back the memory of the weights, of the KV cache, or of both. Nothing is generated without both."""
        if tags := sorted(self._asleep.intersection(what)):
            await self._started().wake_up(tags=tags)
            self._asleep = self._asleep.difference(tags)

    async def status(self) -> dict[str, Any]:
        """What the engine holds and does, as plain values."""
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

    # ---- answers

    async def generate(self, prompt: Prompt, sampling: Sampling, *, adapter: bool = True) -> Group:
        """Answer one prompt `sampling.n` times, as one request: its images are processed and prefilled once.

        An engine with an adapter answers with it, or without it as the base alone (`adapter` False).

        Raises SyncError when vLLM read other tokens than `prompt.tokens`, when the weights changed for the worse
        meanwhile, or when the adapter is missing that is asked for; DataError when vLLM refuses the prompt;
        ClusterError when the engine has died.
        """
        parameters = requests.sampling_parameters(
            sampling,
            index=prompt.index,
            eos_token_ids=self._processor.eos_token_ids,
            banned_tokens=self._processor.banned_tokens,
        )
        answer = await self._ask(prompt, parameters, adapter=adapter)
        group = requests.finished_group(prompt, answer, decode=self._processor.decode)
        self._num_groups += 1
        self._num_mixed += requests.is_mixed(answer)
        self._num_tokens += sum(rollout.num_sampled for rollout in group.rollouts)
        return group

    async def score(self, group: Group, *, adapter: bool = True) -> list[Floats]:
        """Log-probs of tokens that are there already: one [T] per rollout, 0 on the prompt.

        They are of the distribution that is sampled from at the engine's `temperature`, or else the model's own (no
        bans, temperature 1), and nothing of them comes from the prefix cache. vLLM reads an answer only where it leaves
        room for one token more. Raises what `generate` raises.
        """
        rows = (self._score(group.prompt, rollout, adapter=adapter) for rollout in group.rollouts)
        return list(await asyncio.gather(*rows))

    async def _score(self, prompt: Prompt, rollout: Rollout, *, adapter: bool) -> Floats:
        whole = requests.with_answer(prompt, rollout)
        answer = await self._ask(whole, requests.scoring_parameters(), adapter=adapter)
        return requests.prompt_logprobs(whole, answer, first=len(prompt.tokens))

    async def _ask(self, prompt: Prompt, parameters: dict[str, Any], *, adapter: bool) -> RequestOutput:
        """vLLM's answer to one request. Raises what `generate` raises."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self._started()
        adapter = adapter and self._plan is not None
        kwargs = self._processor.engine_kwargs
        build = requests.engine_prompt
        request = await asyncio.to_thread(build, prompt, kwargs) if prompt.media else build(prompt, kwargs)
        final = SamplingParams(**parameters, output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"{prompt.index}-{next(self._counter)}"
        self._check_weights(adapter=adapter)
        lora = self._lora_request() if adapter else None
        self._running[name] = adapter
        answer: RequestOutput | None = None
        try:
            async for output in llm.generate(request, final, name, lora_request=lora):
                answer = output
        except EngineDeadError as error:
            raise await self._death() from error
        except (ValueError, VLLMError) as error:  # its verdict on a request: too long, too many images, ...
            raise DataError(f"{prompt.source}: vLLM refused the prompt: {one_line(error)}") from error
        finally:
            del self._running[name]
        self._check_weights(adapter=adapter)
        if answer is None:
            raise ClusterError(f"rollout engine {self.name} gave no answer to {prompt.source}")
        return answer

    # ---- weights

    async def begin_update(self, version: int, *, adapter: bool = False, readback: ReadbackPlan | None = None) -> None:
        """Pause generation and get ready for all the weights of `version`: those of the model without adapters, or
        those of its adapter. A begun update that never ended is given up.

        With `readback` the layers of the model are read back before the update ends; those of an adapter always are.

        Raises SyncError when an adapter is to come and there is no room for one, or no whole base below it.
        """
        llm = self._started()
        if adapter and self._plan is None:
            raise SyncError(f"rollout engine {self.name} was sent an adapter and was started without room for one")
        if adapter and not self._base_is_whole:
            raise SyncError(
                f"rollout engine {self.name} was sent an adapter, and not all of the base below it: "
                f"{self._broken}; sync the base first"
            )
        self._pending, self._coming = version, self._plan if adapter else None
        self._release_all()
        # Nothing may be generated from half an update; only `finish_update` lifts this.
        self._broken = f"the {'adapter' if adapter else 'weights'} of version {version} have not all arrived"
        await llm.pause_generation(mode="keep", clear_cache=False)
        if self._coming is not None:
            await self._call("vlmrl_begin_adapter", announcement(self._coming))
        else:
            self._base_is_whole, self._adapter = False, None
            await self._call("vlmrl_begin", readback)

    async def finish_update(self, *, vision_changed: bool) -> str:
        """End the update, forget what was computed from the old weights, and resume generation.

        `vision_changed` says whether vision tower or projector may have changed; the engine also sees for itself, and
        knows that its adapter does not reach them.

        Returns: the fingerprint of what the workers received and loaded (`models.weights.fingerprint`), or of an
        adapter that of what their layers hold (`models.adapter_plan.adapter_fingerprint`).

        Raises SyncError when vLLM's model did not take a tensor that came, or lacks one that did not, or when its
        layers hold other weights or another adapter than came; the engine then refuses to generate until a complete
        update, and its version stays.
        """
        llm, version = self._started(), self._require_update()
        self._release_all()
        reports: list[Any] = await self._call("vlmrl_finish")
        plan = self._coming
        problem = problem_of(reports) if plan is None else problem_of_adapter(reports, plan.scaling)
        if problem is not None:
            raise await self._refusal(version, problem)
        digests: dict[str, str] = reports[0]["digests"]
        await self._reset_prefix_cache()
        if plan is not None:
            held = adapter_fingerprint(digests, reports[0]["factor"] * plan.scaling)
            self._adapter = HeldAdapter(version, held)
        else:
            held = fingerprint(digests)
            if vision_changed or self._vision_differs(digests):
                await self._reset_encoder_cache()
            self._digests, self._base_is_whole = digests, True
            self._readback = [report["readback"] for report in reports if "readback" in report]
        await llm.update_weight_version(str(version))
        self.version, self._pending, self._broken = version, None, None
        if self._adapter is None:  # what was asked of the adapter before a new base came cannot go on
            await llm.abort([name for name, adapter in self._running.items() if adapter])
        if not self._asleep:  # without its KV cache it goes on when that wakes
            await llm.resume_generation()
        return held

    async def readback(self) -> list[ReadbackReport]:
        """What each worker read back from its layers after the last update of the model, where that was asked for."""
        return self._readback

    async def _reset_prefix_cache(self) -> None:
        """What was computed from the old weights is thrown away, that of requests in flight too."""
        await self._started().reset_prefix_cache(reset_running_requests=True)

    async def _reset_encoder_cache(self) -> None:
        """Image embeddings are kept by content hash: those of the old tower would be served for ever."""
        await self._started().reset_encoder_cache()

    def _vision_differs(self, digests: dict[str, str]) -> bool:
        names = digests.keys() | self._digests.keys()
        seen = (name for name in names if self._processor.parameter_group(name) != "language")
        return any(digests.get(name) != self._digests.get(name) for name in seen)

    # ---- inside

    def arguments(self) -> dict[str, Any]:
        """What vLLM is started with: arguments of its AsyncEngineArgs."""
        given = self._settings
        return {
            "model": given.model,
            "dtype": _DTYPES.get(given.dtype, given.dtype),
            "max_model_len": given.max_model_len,
            "trust_remote_code": given.trust_remote_code,
        } | engine_arguments(
            vllm=given.vllm,
            columns=given.columns,
            processor=self._processor,
            top_p=given.top_p,
            adapter=given.adapter,
            demand=given.demand,
        )

    def _started(self) -> AsyncLLM:
        if self._llm is None:
            raise ClusterError(f"rollout engine {self.name} is not running")
        return self._llm

    def _check_weights(self, *, adapter: bool) -> None:
        """While an update is under way a request may queue up: vLLM holds it back. After a failed one nothing may
        pass, and without its adapter nothing that asks for it.
        """
        if self._broken is not None and self._pending is None:
            raise SyncError(self._broken)
        if adapter and self._adapter is None:
            raise SyncError(
                f"rollout engine {self.name} has no adapter on its base of version {self.version}: sync one first"
            )

    def _lora_request(self) -> LoRARequest:
        """What makes vLLM use the adapter."""
        from vllm.lora.request import LoRARequest

        assert self._adapter is not None
        # Nothing lies at this path, and vLLM does not look: the adapter is in place. But cached prefixes are filed by
        # it, so that those of another version are not found, whatever is forgotten.
        return LoRARequest("vlmrl", requests.ADAPTER_ID, f"/vlmrl/adapter/{self._adapter.version}")

    def _require_update(self) -> int:
        if self._pending is None:
            raise SyncError(f"rollout engine {self.name} was sent weights without the beginning of an update")
        return self._pending

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's WeightReceiver. An error there leaves the engine refusing to generate."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            results: list[Any] = await self._started().collective_rpc(method, args=arguments)
        except EngineDeadError as error:
            raise await self._death() from error
        except Exception as error:  # vLLM sends the worker's exception as text, in an exception of its own
            raise await self._refusal(self._pending, one_line(error)) from error
        return results

    async def _refusal(self, version: int | None, problem: str) -> SyncError:
        """From here on nothing is generated, and what was under way is given up."""
        self._pending, self._adapter = None, None
        self._broken = f"sync of version {version} to rollout engine {self.name} failed: {problem}"
        await self._started().abort(list(self._running))
        return SyncError(self._broken)

    async def _death(self) -> DiedError:
        await asyncio.sleep(LAST_WORDS_S)
        return DiedError(f"rollout engine {self.name} {self._launch.death()}")
