"""The rollout engine: vLLM's AsyncLLM, token ids in and token ids out, and weights that provably arrived."""

from __future__ import annotations

import asyncio
import itertools
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl import plugins, startup
from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError, DataError, SyncError
from vlmrl.models.weights import Bucket, fingerprint
from vlmrl.rollout import requests, transfer
from vlmrl.rollout.device_transfer import Offer
from vlmrl.rollout.launch import LAST_WORDS_S, Launch, one_line, settings
from vlmrl.rollout.sampling import Sampling
from vlmrl.types import Floats, Group, Prompt, Rollout

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class RolloutEngine:
    """One vLLM engine. All its methods belong to one event loop.

    Log-probs of answers are those of the distribution that was sampled from: bans applied, then divided by the
    temperature. With `top_p` below 1 they are the model's own instead (no bans, temperature 1), because no trainer can
    reproduce the nucleus.

    Weights change between `begin_update` and `finish_update`. Requests in flight pause there and go on afterwards; what
    they had computed is computed again, and a group whose answers saw two versions carries the older. When an update
    goes wrong the engine refuses to generate, with the reason, until one goes right; its `version` stays what it was.
    """

    def __init__(
        self,
        *,
        model: str,
        vllm: Vllm,
        columns: Columns,
        trust_remote_code: bool,
        dtype: str,
        max_model_len: int,
        top_p: float,
        name: str,
    ) -> None:
        """Starts nothing yet. `dtype` is bf16 or fp32; `max_model_len` counts the tokens of prompt and answer
        together.
        """
        self.name = name
        self.version = 0
        self._model, self._vllm, self._columns = model, vllm, columns
        self._trust_remote_code, self._dtype = trust_remote_code, _DTYPES.get(dtype, dtype)
        self._max_model_len, self._top_p = max_model_len, top_p
        self._llm: AsyncLLM | None = None
        self._launch = Launch(f"{name} ({model})")
        self._counter = itertools.count()
        self._running: set[str] = set()
        self._num_tokens = self._num_groups = self._num_mixed = 0
        self._pending: int | None = None
        """The version of the update that has begun."""
        self._broken: str | None = None
        self._digests: dict[str, str] = {}
        self._is_asleep = False

    @cached_property
    def _processor(self) -> plugins.Processor:
        startup.prepare()
        return plugins.processor(
            self._model,
            min_pixels=self._columns.min_pixels,
            max_pixels=self._columns.max_pixels,
            trust_remote_code=self._trust_remote_code,
        )

    # ---- life

    async def start(self) -> None:
        """Start vLLM and wait until it serves.

        Raises ClusterError when vLLM does not start, for whatever reason, or not within `vllm.start_timeout_s`;
        ConfigError when the model is not there.
        """
        if Path(self._model).is_dir():
            os.environ["HF_HUB_OFFLINE"] = "1"
        _ = self._processor  # a model that is not there is found before anything is started
        self._llm = await self._launch.start(self.arguments, timeout_s=self._vllm.start_timeout_s)
        await self._call("vlmrl_prepare")
        await self._llm.update_weight_version(str(self.version))

    async def shutdown(self) -> None:
        """Stop vLLM and wait until its processes are gone. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await self._launch.stop(llm)

    async def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache (needs `vllm.enable_sleep`). On CPU nothing happens."""
        if self._vllm.enable_sleep and not self._is_asleep:
            await self._started().sleep(level=1, mode="keep")
            self._is_asleep = True

    async def wake(self) -> None:
        """Take the memory back."""
        if self._is_asleep:
            await self._started().wake_up()
            self._is_asleep = False

    async def status(self) -> dict[str, Any]:
        """What the engine holds and does, as plain values."""
        return {
            "name": self.name,
            "version": self.version,
            "fingerprint": fingerprint(self._digests) if self._digests else None,
            "num_running": len(self._running),
            "num_groups": self._num_groups,
            "num_mixed_groups": self._num_mixed,
            "num_tokens": self._num_tokens,
            "is_asleep": self._is_asleep,
            "broken": self._broken,
        }

    # ---- answers

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Answer one prompt `sampling.n` times, as one request: its images are processed and prefilled once.

        Raises SyncError when vLLM read other tokens than `prompt.tokens`, or when the weights changed for the worse
        meanwhile; DataError when vLLM refuses the prompt; ClusterError when the engine has died.
        """
        parameters = requests.sampling_parameters(
            sampling,
            index=prompt.index,
            eos_token_ids=self._processor.eos_token_ids,
            banned_tokens=self._processor.banned_tokens,
        )
        answer = await self._ask(prompt, parameters)
        group = requests.finished_group(prompt, answer, decode=self._processor.decode)
        self._num_groups += 1
        self._num_mixed += requests.is_mixed(answer)
        self._num_tokens += sum(rollout.num_sampled for rollout in group.rollouts)
        return group

    async def score(self, group: Group) -> list[Floats]:
        """Log-probs of tokens that are there already: one [T] per rollout, 0 on the prompt.

        They are the model's own (no bans, temperature 1), whatever the answers were sampled from, and nothing of them
        comes from the prefix cache. vLLM reads an answer only where it leaves room for one token more. Raises what
        `generate` raises.
        """
        return list(await asyncio.gather(*(self._score(group.prompt, rollout) for rollout in group.rollouts)))

    async def _score(self, prompt: Prompt, rollout: Rollout) -> Floats:
        whole = requests.with_answer(prompt, rollout)
        answer = await self._ask(whole, requests.scoring_parameters())
        return requests.prompt_logprobs(whole, answer, first=len(prompt.tokens))

    async def _ask(self, prompt: Prompt, parameters: dict[str, Any]) -> RequestOutput:
        """vLLM's answer to one request. Raises what `generate` raises."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self._started()
        self._check_weights()
        kwargs = self._processor.engine_kwargs
        build = requests.engine_prompt
        request = await asyncio.to_thread(build, prompt, kwargs) if prompt.media else build(prompt, kwargs)
        final = SamplingParams(**parameters, output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"{prompt.index}-{next(self._counter)}"
        self._running.add(name)
        answer: RequestOutput | None = None
        try:
            async for output in llm.generate(request, final, name):
                answer = output
        except EngineDeadError as error:
            raise await self._death() from error
        except (ValueError, VLLMError) as error:  # its verdict on a request: too long, too many images, ...
            raise DataError(f"{prompt.source}: vLLM refused the prompt: {one_line(error)}") from error
        finally:
            self._running.discard(name)
        self._check_weights()
        if answer is None:
            raise ClusterError(f"rollout engine {self.name} gave no answer to {prompt.source}")
        return answer

    # ---- weights

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Let the workers meet the learner, which must be coming at the same time (`vllm.sync_backend` nccl or ipc).

        `init_info` holds the fields of vLLM's WeightTransferInitInfo. Raises ClusterError when they do not meet.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        try:
            await self._started().init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        except Exception as error:  # vLLM sends the worker's exception as text, in an exception of its own
            raise ClusterError(
                f"rollout engine {self.name} could not meet the trainer over {self._vllm.sync_backend}: "
                f"{one_line(error)}; vllm.sync_backend shm needs no meeting"
            ) from error

    async def begin_update(self, version: int) -> None:
        """Pause generation and get ready for all the weights of `version`. A begun update that never ended is given
        up.
        """
        llm = self._started()
        self._pending = version
        # Nothing may be generated from half an update; only `finish_update` lifts this.
        self._broken = f"the weights of version {version} have not all arrived"
        await llm.pause_generation(mode="keep", clear_cache=False)
        self._received: dict[str, str] = {}
        await self._call("vlmrl_begin")

    async def load_bucket(self, bucket: Bucket) -> None:
        """Load some of the weights, under Hugging Face's parameter names."""
        self._require_update()
        with transfer.shared(bucket) as ticket:
            await self._call("vlmrl_load", ticket)

    async def receive(self, offer: Offer) -> None:
        """Load some of the weights from GPU to GPU; over nccl the learner must be sending them at the same time."""
        self._require_update()
        await self._call("vlmrl_receive", offer)

    async def finish_update(self, *, vision_changed: bool) -> str:
        """End the update, forget what was computed from the old weights, and resume generation.

        `vision_changed` says whether vision tower or projector may have changed; the engine also sees for itself.

        Returns: the fingerprint of what the workers received and loaded (`models.weights.fingerprint`).

        Raises SyncError when vLLM's model did not take a tensor that came, or lacks one that did not; the engine then
        refuses to generate until a complete update, and its version stays.
        """
        llm, version = self._started(), self._require_update()
        reports: list[dict[str, Any]] = await self._call("vlmrl_finish")
        self._pending = None
        problem = problem_of(reports)
        if problem is not None:
            self._broken = f"publishing version {version} to rollout engine {self.name} failed: {problem}"
            await llm.abort(list(self._running))
            raise SyncError(self._broken)
        digests: dict[str, str] = reports[0]["digests"]
        await llm.reset_prefix_cache(reset_running_requests=True)
        if vision_changed or self._vision_differs(digests):
            await self._reset_encoder_cache()
        await llm.update_weight_version(str(version))
        self.version, self._digests, self._broken = version, digests, None
        await llm.resume_generation()
        return fingerprint(digests)

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
        return {
            "model": self._model,
            "dtype": self._dtype,
            "max_model_len": self._max_model_len,
            "trust_remote_code": self._trust_remote_code,
        } | settings(vllm=self._vllm, columns=self._columns, processor=self._processor, top_p=self._top_p)

    def _started(self) -> AsyncLLM:
        if self._llm is None:
            raise ClusterError(f"rollout engine {self.name} is not running")
        return self._llm

    def _check_weights(self) -> None:
        """While an update is under way a request may queue up: vLLM holds it back. After a failed one nothing may
        pass.
        """
        if self._broken is not None and self._pending is None:
            raise SyncError(self._broken)

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
            version, self._pending = self._pending, None
            self._broken = f"publishing version {version} to rollout engine {self.name} failed: {one_line(error)}"
            await self._started().abort(list(self._running))
            raise SyncError(self._broken) from error
        return results

    async def _death(self) -> ClusterError:
        await asyncio.sleep(LAST_WORDS_S)
        return ClusterError(f"rollout engine {self.name} has died{self._launch.because()}")


def problem_of(reports: list[dict[str, Any]]) -> str | None:
    """What was wrong with an update, by the workers' reports; None when it was complete on all of them."""
    for report in reports:
        if report["ignored"]:
            return f"vLLM's model has no place for {_some(report['ignored'])}"
        if report["missing"]:
            return f"no weights came for {_some(report['missing'])}"
        if report["digests"] != reports[0]["digests"]:
            return "its workers received different weights"
    return None


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
