"""The loop with small honest parts: an engine that answers by a script, a policy that remembers what it was taught."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from vlmrl.config.adapter_checks import is_one_pass
from vlmrl.config.run import RlConfig
from vlmrl.errors import SyncError
from vlmrl.rollout.sampling import Sampling
from vlmrl.trainer import Judged, check_versions, compare_engine, judge, largest_gap, to_samples, train
from vlmrl.types import Experience, Floats, Group, Metrics, Prompt, Rollout, Sample, Score

ANSWER_LOGPROB = -0.5


def make_prompt(index: int, length: int = 2) -> Prompt:
    tokens = np.arange(length, dtype=np.int64)
    return Prompt(index=index, source=f"toy:{index}", text="?", tokens=tokens, request=tokens, label="right")


def make_rollout(prompt: Prompt, text: str, *, version: int, length: int = 1, finish: str = "stop") -> Rollout:
    sampled = np.array([False] * len(prompt.tokens) + [True] * length)
    return Rollout(
        tokens=np.concatenate([prompt.tokens, np.full(length, 7)]),
        sampled=sampled,
        logprobs=np.where(sampled, ANSWER_LOGPROB, 0.0).astype(np.float32),
        text=text,
        finish_reason=finish,  # type: ignore[arg-type]
        version=version,
    )


class ScriptedEngine:
    """Answers every prompt twice: once wrong, once right. Its version is what was last published."""

    def __init__(self) -> None:
        self.version = 0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        return [
            Group(
                prompt,
                (
                    make_rollout(prompt, "wrong", version=self.version),
                    make_rollout(prompt, "right", version=self.version, length=3),
                ),
            )
            for prompt in prompts
        ]


class CountingPrompts:
    def __init__(self) -> None:
        self.position = 0

    def draw(self, count: int) -> tuple[list[Prompt], Metrics]:
        start, self.position = self.position, self.position + count
        return [make_prompt(index) for index in range(start, self.position)], {"media/bytes_moved": 0.0}


class LabelRewarder:
    def score(self, groups: Sequence[Group]) -> list[list[Score]]:
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
        own = self.logprobs(experience.samples)
        return {"policy/loss": 0.0} | ({} if experience.old_logprobs is not None else compare_engine(experience, own))

    def publish(self, version: int) -> Metrics:
        self.engine.version = version
        return {"sync/version": float(version)}


class Notebook:
    def __init__(self) -> None:
        self.steps: dict[int, Metrics] = {}
        self.phases: list[str] = []

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


def run(settings: RlConfig, policy: RememberingPolicy, *, steps: int) -> Notebook:
    notebook = Notebook()
    train(
        settings,
        prompts=CountingPrompts(),
        engine=policy.engine,
        rewarder=LabelRewarder(),
        policy=policy,
        reference=None,
        report=notebook,
        check_sight=lambda step, groups: {},
        check_publish=lambda version: {},
        after_step=lambda step, judged: {},
        save=lambda step: None,
        first_step=1,
        last_step=steps,
    )
    return notebook


def test_a_step_goes_through_its_phases_and_every_publish_has_the_next_version() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    notebook = run(config(), policy, steps=2)
    assert notebook.phases == ["data", "rollout", "reward", "logprob", "update", "publish"] * 2
    assert [notebook.steps[step]["sync/version"] for step in (1, 2)] == [1.0, 2.0]
    assert notebook.steps[1]["reward/mean"] == 0.5
    assert notebook.steps[1]["response/tokens_mean"] == 2.0
    assert notebook.steps[1]["sync/logprob_diff_max"] == 0.0


def test_right_answers_gain_what_wrong_ones_lose_on_their_sampled_tokens_alone() -> None:
    policy = RememberingPolicy(ScriptedEngine())
    run(config(), policy, steps=1)
    wrong, right = policy.taught[0].advantages[:2]
    # Rewards 0 and 1: mean 0.5, unbiased deviation 0.7071, so -+0.5 / (0.7071 + 1e-6) = -+0.7071.
    np.testing.assert_allclose(wrong, [0, 0, -0.70711], atol=1e-5)
    np.testing.assert_allclose(right, [0, 0, 0.70711, 0.70711, 0.70711], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        ({}, False),
        ({"train": {"batch_size": 2}}, True),
        ({"train": {"batch_size": 4, "max_epochs": 2}}, True),
        ({"algo": {"kl": {"init_coef": 0.1}}}, True),
    ],
)
def test_old_log_probs_take_a_pass_of_their_own_only_when_the_update_cannot_find_them(
    changes: dict[str, object], asks: bool
) -> None:
    policy = RememberingPolicy(ScriptedEngine())
    settings = config(**changes)
    assert is_one_pass(settings.rollout, settings.train, settings.algo) is not asks
    if not settings.algo.kl.init_coef:
        run(settings, policy, steps=1)
        assert (policy.taught[0].old_logprobs is not None) is asks


def test_a_gap_that_the_update_finds_stops_the_run_before_its_weights_go_anywhere() -> None:
    policy = RememberingPolicy(ScriptedEngine(), offset=0.1)
    policy.engine.version = 0
    with pytest.raises(SyncError, match="disagree"):
        run(config(), policy, steps=1)
    assert len(policy.taught) == 1
    assert policy.engine.version == 0


def test_an_engine_that_missed_a_publish_stops_the_run() -> None:
    class DeafPolicy(RememberingPolicy):
        def publish(self, version: int) -> Metrics:
            return {"sync/version": float(version)}

    with pytest.raises(SyncError, match=r"toy:2 was made by weights of version 0, the trainer is at version 1"):
        run(config(), DeafPolicy(ScriptedEngine()), steps=2)


def test_an_engine_with_other_weights_stops_the_run() -> None:
    with pytest.raises(SyncError, match=r"engine and trainer disagree.* by 0\.1 on average"):
        run(config(), RememberingPolicy(ScriptedEngine(), offset=0.1), steps=1)


def test_the_bound_on_the_gap_can_be_set() -> None:
    loose = config(vllm={"max_logprob_diff": 0.2})
    notebook = run(loose, RememberingPolicy(ScriptedEngine(), offset=0.1), steps=1)
    assert notebook.steps[1]["sync/logprob_diff_max"] == pytest.approx(0.1, abs=1e-6)
    # k3: e^0.1 - 1 - 0.1 = 0.0051709
    assert notebook.steps[1]["sync/kl_rollout_train"] == pytest.approx(0.0051709, abs=1e-6)


def test_kl_in_the_reward_is_charged_to_the_tokens_that_drifted() -> None:
    settings = config(algo={"kl": {"init_coef": 0.5, "estimator": "k1"}, "advantage": {"estimator": "dr_grpo"}})
    prompt = make_prompt(0)
    groups = [
        Group(prompt, (make_rollout(prompt, "wrong", version=0), make_rollout(prompt, "right", version=0, length=2)))
    ]
    samples = to_samples(groups)
    old = [rollout.logprobs for rollout in groups[0].rollouts]
    ref = [np.where(s.sampled, row - 0.2, 0).astype(np.float32) for s, row in zip(samples, old, strict=True)]
    judged, metrics = judge(settings, groups, [[Score(0.0), Score(1.0)]], samples, old=old, ref=ref)
    # k1 is 0.2 on each sampled token, so 0.1 is charged to it and to those before it.
    np.testing.assert_allclose(judged.experience.advantages[0], [0, 0, -0.6], atol=1e-6)
    np.testing.assert_allclose(judged.experience.advantages[1], [0, 0, 0.3, 0.4], atol=1e-6)
    assert metrics["kl/reference"] == pytest.approx(0.2, abs=1e-6)
    assert judged.experience.ref_logprobs is None


def test_kl_in_the_loss_leaves_the_advantages_alone_and_hands_the_reference_on() -> None:
    settings = config(
        algo={"kl": {"init_coef": 0.5, "estimator": "k3", "use_loss": True}, "advantage": {"estimator": "rloo"}}
    )
    prompt = make_prompt(0)
    groups = [Group(prompt, (make_rollout(prompt, "wrong", version=0), make_rollout(prompt, "right", version=0)))]
    samples = to_samples(groups)
    old = [rollout.logprobs for rollout in groups[0].rollouts]
    judged, _ = judge(settings, groups, [[Score(0.0), Score(1.0)]], samples, old=old, ref=old)
    np.testing.assert_allclose(judged.experience.advantages[1], [0, 0, 1.0])
    assert judged.experience.ref_logprobs is old


def test_a_constant_group_is_counted_and_teaches_nothing() -> None:
    prompt = make_prompt(0)
    pair = (make_rollout(prompt, "a", version=0), make_rollout(prompt, "b", version=0))
    groups = [Group(prompt, pair), Group(prompt, pair)]
    samples = to_samples(groups)
    old = [r.logprobs for g in groups for r in g.rollouts]
    scores = [[Score(1.0), Score(1.0)], [Score(0.0), Score(1.0)]]
    judged, metrics = judge(config(), groups, scores, samples, old=old, ref=None)
    assert metrics["group/constant_fraction"] == 0.5
    assert not any(row.any() for row in judged.experience.advantages[:2])
    assert [s.group for s in samples] == [0, 0, 1, 1]


def test_a_step_without_sampled_tokens_has_no_gap() -> None:
    empty = Experience(
        samples=[Sample(np.array([1]), np.array([False]))],
        advantages=[np.zeros(1, np.float32)],
        old_logprobs=None,
        rollout_logprobs=[np.ones(1, np.float32)],
    )
    assert compare_engine(empty, [np.zeros(1, np.float32)])["sync/logprob_diff_max"] == 0.0


def test_versions_agree_when_all_answers_are_new() -> None:
    prompt = make_prompt(0)
    check_versions([Group(prompt, (make_rollout(prompt, "a", version=3),))], version=3)


def test_the_sight_check_gets_the_answers_and_transcripts_what_was_judged() -> None:
    seen: list[Judged] = []

    def remember(step: int, judged: Judged) -> Metrics:
        seen.append(judged)
        return {"eval/toy/pass@1": 1.0}

    def look(step: int, groups: Sequence[Group]) -> Metrics:
        assert {rollout.version for group in groups for rollout in group.rollouts} == {step - 1}
        assert notebook.phases == ["data", "rollout"], "blindness is found before anything is made of the answers"
        return {"sight/old_care": 0.5}

    def ask(version: int) -> Metrics:
        assert policy.engine.version == version == 1, "the new weights are with the engines"
        return {"sync/probe_gap": 0.25}

    policy, notebook = RememberingPolicy(ScriptedEngine()), Notebook()
    saved: list[tuple[int, set[int]]] = []
    train(
        config(),
        prompts=CountingPrompts(),
        engine=policy.engine,
        rewarder=LabelRewarder(),
        policy=policy,
        reference=None,
        report=notebook,
        check_sight=look,
        check_publish=ask,
        after_step=remember,
        save=lambda step: saved.append((step, set(notebook.steps))),
        first_step=1,
        last_step=1,
    )
    assert [list(row) for row in seen[0].rewards] == [[0.0, 1.0], [0.0, 1.0]]
    assert notebook.steps[1]["eval/toy/pass@1"] == 1.0
    assert notebook.steps[1]["sight/old_care"] == 0.5
    assert notebook.steps[1]["sync/probe_gap"] == 0.25
    assert saved == [(1, {1})], "a step is saved only after its numbers are written"


def test_engines_on_the_original_base_of_a_4_bit_policy_are_bound_only_on_request() -> None:
    def bound(qlora_base: str, **vllm: float) -> float:
        ds = {"param_dtype": "fp32", "load_in_4bit": True, "lora": {"rank": 4}}
        return largest_gap(config(ds=ds, vllm={"qlora_base": qlora_base} | vllm))

    assert bound("dequantized") == 1e-3
    assert bound("original") == float("inf")
    assert bound("original", max_logprob_diff=0.2) == 0.2
