"""Small fakes for the parts of the loop: an engine with scripted responses, a policy that records its updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from vlmrl.config.verbs import RlConfig
from vlmrl.data.experience import Experience
from vlmrl.trainer.collect import Ending, PromptBudget
from vlmrl.trainer.protocols import Critic
from vlmrl.trainer.rl import LoopState, train
from vlmrl.trainer.rollouts import InTurn
from vlmrl.types import Floats, Group, Metrics, Prompt, Rollout, Sample, Sampling, Score
from vlmrl.verify.logprobs import compare_engine

ANSWER_LOGPROB = -0.5


def make_prompt(index: int, length: int = 2) -> Prompt:
    tokens = np.arange(length, dtype=np.int64)
    return Prompt(index=index, source=f"toy:{index}", text="?", tokens=tokens, request=tokens, label="right")


def make_rollout(prompt: Prompt, text: str, *, version: int, length: int = 1, finish: str = "stop") -> Rollout:
    sampled = np.array([False] * len(prompt.tokens) + [True] * length)
    return Rollout.of_response(
        tokens=np.concatenate([prompt.tokens, np.full(length, 7)]),
        sampled=sampled,
        logprobs=np.where(sampled, ANSWER_LOGPROB, 0.0).astype(np.float32),
        text=text,
        finish_reason=finish,  # type: ignore[arg-type]
        version=version,
        media=prompt.media,
    )


class ScriptedEngine:
    """Responds to every prompt twice, once wrong and once right. Its version is that of the last weight sync."""

    def __init__(self) -> None:
        self.version = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        groups = [
            Group(
                prompt,
                (
                    make_rollout(prompt, "wrong", version=self.version),
                    make_rollout(prompt, "right", version=self.version, length=3),
                ),
            )
            for prompt in prompts
        ]
        for group in groups[::-1]:
            if on_group is not None:
                on_group(group)
        return groups


class CountingPrompts:
    num_rows = 1_000_000

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        start, self.position = self.position, self.position + count
        return [make_prompt(index) for index in range(start, self.position)], {"media/bytes_moved": 0.0}


class LabelRewarder:
    """Scores 1 for the label. Records the order in which scoring began."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin(self, group: Group) -> None:
        self.begun.append(group.prompt.index)

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        return [
            [
                Score(float(r.text == group.prompt.label), {"exact": float(r.text == group.prompt.label)})
                for r in group.rollouts
            ]
            for group in groups
        ]


class RememberingPolicy:
    def __init__(self, engine: ScriptedEngine, *, offset: float = 0.0) -> None:
        self.engine = engine
        self.offset = offset
        self.taught: list[Experience] = []

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return [np.where(s.sampled, ANSWER_LOGPROB + self.offset, 0.0).astype(np.float32) for s in samples]

    def update(self, experience: Experience, *, step: int) -> Metrics:
        self.taught.append(experience)
        logprobs = self.logprobs(experience.samples)
        return {"policy/loss": 0.0} | (
            {} if experience.old_logprobs is not None else compare_engine(experience, logprobs)
        )

    def take_pass_metrics(self) -> Metrics:
        return {}


class ScriptedSync:
    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    def sync(self, version: int) -> Metrics:
        self.engine.version = version
        return {"sync/version": float(version)}


class Notebook:
    def __init__(self) -> None:
        self.steps: dict[int, Metrics] = {}
        self.phases: list[str] = []
        self.ending: Ending | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def step(self, step: int, metrics: Metrics) -> None:
        self.steps[step] = metrics


def config(**changes: object) -> RlConfig:
    return RlConfig.model_validate(
        {
            "actor": {"model_name_or_path": "model"},
            "data": {"prompt_dataset": "toy"},
            "rollout": {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 4},
            "train": {"batch_size": 4},
            "ds": {"param_dtype": "fp32"},
        }
        | changes
    )


def run(
    settings: RlConfig,
    policy: RememberingPolicy,
    *,
    steps: int,
    rewarder: LabelRewarder | None = None,
    critic: Critic | None = None,
    num_prompts: int = 1_000_000,
    notebook: Notebook | None = None,
    **hooks: object,
) -> Notebook:
    notebook, rewarder = notebook or Notebook(), rewarder or LabelRewarder()
    prompts = hooks.pop("prompts", None) or CountingPrompts()
    in_turn = InTurn(settings, prompts=prompts, engine=policy.engine, rewarder=rewarder, report=notebook)  # type: ignore[arg-type]
    notebook.ending = train(
        settings,
        rewarder=rewarder,
        policy=policy,
        critic=critic,
        report=notebook,
        last_step=steps,
        **{  # type: ignore[arg-type]
            "rollouts": in_turn,
            "weight_sync": ScriptedSync(policy.engine),
            "first_step": 1,
            "reference": None,
            "budget": PromptBudget(num_prompts),
            "state": LoopState(settings.algo.kl.init_coef),
            "check_responses": lambda step, groups: dict,
            "check_sync": lambda version: {},
            "after_step": lambda step, batch: {},
            "save": lambda step, state: None,
        }
        | hooks,
    )
    return notebook
