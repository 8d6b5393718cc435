"""`vlmrl serve-rm`: an HTTP server of a reward model or of reward functions."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from vlmrl.config.actor import Model
from vlmrl.config.serving import ServeConfig
from vlmrl.config.vision import Vision
from vlmrl.data.balance import spread
from vlmrl.data.media import make_row_media
from vlmrl.data.responses import sft_sample
from vlmrl.errors import DataError
from vlmrl.learning.settings import RewardModelSettings
from vlmrl.rewards.bounds import problem_of_reward
from vlmrl.rewards.client import read_token
from vlmrl.rewards.function_worker import RewardResult
from vlmrl.rewards.protocol import RewardRequest
from vlmrl.rewards.server import FunctionScorer, Scorer, check_token, listen, run
from vlmrl.types import Prompt, Sample


def serve_rm(config: ServeConfig) -> None:
    """Serve until the process gets a signal to stop.

    Raises ConfigError for a model or function that cannot be loaded, an address that cannot be had, and one that others
    reach without a token.
    """
    serve, token = config.serve, read_token()
    check_token(serve.host, token)
    # uvicorn finishes the requests in progress, and then raises the signal again for the handler that was there before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with listen(serve.host, serve.port) as listener:
        asyncio.run(_serve(config, token, listener))


async def _serve(config: ServeConfig, token: str | None, listener: socket.socket) -> None:
    serve = config.serve
    async with _scorer(config) as scorer:
        host = f"[{serve.host}]" if ":" in serve.host else serve.host
        print(f"vlmrl serve-rm: http://{host}:{listener.getsockname()[1]}", flush=True)
        await run(scorer, serve, token, listener=listener)


@asynccontextmanager
async def _scorer(config: ServeConfig) -> AsyncIterator[Scorer]:
    reward = config.reward
    if reward.model_name_or_path is not None:
        yield ModelScorer(config, reward.model_name_or_path)
        return
    async with FunctionScorer(
        reward.functions,
        reward.user_function,
        num_workers=reward.num_workers,
        time_limit_s=reward.time_limit_s,
        pass_env=reward.pass_env,
    ) as scorer:
        yield scorer


class ModelScorer:
    """Scores with a reward model, which reads the rendered prompt, the response and an end token; of a conversation all
    of it."""

    def __init__(self, config: ServeConfig, path: str) -> None:
        """Raises ConfigError when there is no such model."""
        columns = config.data
        model = Model(model_name_or_path=path)
        self._columns = columns
        self._max_tokens = config.train.max_tokens_per_gpu
        settings = RewardModelSettings(
            path=path,
            flag="reward.model_name_or_path",
            actor=model,
            ds=config.ds,
            loop=config.train,
            columns=columns,
            vision=Vision(),
            normalize=config.reward.normalize_enable,
        )
        self._model = settings.build()  # imports torch: a server of a function does without
        self._processor = self._model.processor
        self.wants_images = self._processor.resize_factor is not None

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        # In a thread: the event loop stays free for other clients.
        return await asyncio.to_thread(self._results, requests)

    def _results(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        results = [RewardResult(problem="it was not scored")] * len(requests)
        samples: dict[int, Sample] = {}
        for number, request in enumerate(requests):
            try:
                samples[number] = self._sample(request, number)
            except DataError as error:
                results[number] = RewardResult(problem=str(error))
        numbers = list(samples)
        for place, score in self._scores(list(samples.values())):
            result = RewardResult(score)
            if problem := problem_of_reward(score):
                result = RewardResult(problem=f"the model returned {score:g}, {problem}")
            results[numbers[place]] = result
        return results

    def _sample(self, request: RewardRequest, number: int) -> Sample:
        """Raises DataError for images that do not fit the prompt, too many tokens, and text that cannot be encoded."""
        try:
            request.query.encode()
        except UnicodeEncodeError as error:  # a tokenizer would fail, and with it the whole batch
            raise DataError(f"prompt and response are not text: {error.reason}") from error
        images = [one.fetch() for one in request.all_media]
        media = make_row_media(images, processor=self._processor, columns=self._columns)
        before = request.query.removesuffix(request.response)
        tokens, engine_input = self._processor.encode(before, [one.size for one in media])
        prompt = Prompt(number, request.source, before, tokens, engine_input, request.label, media)
        sample = sft_sample(prompt, request.response, self._processor)
        if len(sample.tokens) > self._columns.max_len:
            raise DataError(f"prompt and response have {len(sample.tokens)} tokens, more than data.max_len")
        return sample

    def _scores(self, samples: Sequence[Sample]) -> list[tuple[int, float]]:
        if not samples:
            return []
        (packs,) = spread(
            samples,
            num_ranks=1,
            layout="padded",  # right for every model, recurrent ones included
            max_tokens=self._max_tokens,
            max_samples=None,
            image_cost=lambda image: float(np.prod(self._processor.grid(image.size))),
            filler=None,
        )
        scores, _ = self._model.score(packs)
        return scores
