"""`vlmrl serve-rm`: puts a reward model, or the user's reward function, behind an HTTP server."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from vlmrl.config.actor import Model
from vlmrl.config.run import ServeConfig
from vlmrl.config.vision import Vision
from vlmrl.data.balance import spread
from vlmrl.data.media import make_row_media
from vlmrl.data.responses import sft_sample
from vlmrl.errors import DataError
from vlmrl.learning.settings import RewardModelSettings
from vlmrl.rewards.client import read_token
from vlmrl.rewards.local_worker import Verdict
from vlmrl.rewards.question import Question
from vlmrl.rewards.server import FunctionJudge, Judge, check_token, listen, run
from vlmrl.types import Prompt, Sample


def serve_rm(config: ServeConfig) -> None:
    """Serve until the process is told to stop.

    Raises ConfigError for a model or function that cannot be loaded, an address that cannot be had, and one that others
    reach without a token.
    """
    serve, token = config.serve, read_token()
    check_token(serve.host, token)
    # uvicorn answers what is under way, and then hands the signal on to whoever handled it before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with listen(serve.host, serve.port) as listener, closing(_judge(config)) as judge:
        host = f"[{serve.host}]" if ":" in serve.host else serve.host
        print(f"vlmrl serve-rm: http://{host}:{listener.getsockname()[1]}", flush=True)
        run(judge, serve, token, listener=listener)


def _judge(config: ServeConfig) -> Judge:
    reward = config.reward
    if reward.model_name_or_path is not None:
        return ModelJudge(config, reward.model_name_or_path)
    return FunctionJudge(
        reward.functions,
        reward.user_function,
        num_workers=reward.num_workers,
        time_limit_s=reward.time_limit_s,
        pass_env=reward.pass_env,
    )


class ModelJudge:
    """A reward model as a judge. It reads the rendered prompt, the answer and an end token."""

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

    def judge(self, questions: Sequence[Question]) -> list[Verdict]:
        verdicts = [Verdict(problem="it was not scored")] * len(questions)
        samples: dict[int, Sample] = {}
        for number, question in enumerate(questions):
            try:
                samples[number] = self._sample(question, number)
            except DataError as error:
                verdicts[number] = Verdict(problem=str(error))
        numbers = list(samples)
        for place, score in self._scores(list(samples.values())):
            is_number = math.isfinite(score)
            verdicts[numbers[place]] = Verdict(score) if is_number else Verdict(problem=f"the model said {score}")
        return verdicts

    def close(self) -> None:
        """Nothing outlives the process."""

    def _sample(self, question: Question, number: int) -> Sample:
        """Raises DataError for a prompt whose images do not fit it, for too many tokens, and for what is no text."""
        try:
            (question.prompt + question.response).encode()
        except UnicodeEncodeError as error:  # a tokenizer would fail, and with it the whole batch
            raise DataError(f"prompt and answer are no text: {error.reason}") from error
        images = [one.fetch() for one in question.media]
        media = make_row_media(images, processor=self._processor, columns=self._columns)
        tokens, request = self._processor.encode(question.prompt, [one.size for one in media])
        prompt = Prompt(number, question.source, question.prompt, tokens, request, question.label, media)
        sample = sft_sample(prompt, question.response, self._processor)
        if len(sample.tokens) > self._columns.max_len:
            raise DataError(f"prompt and answer have {len(sample.tokens)} tokens, more than data.max_len")
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
