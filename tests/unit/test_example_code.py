"""The Python files in examples/ work as documented, through the loaders of a run."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vlmrl.algorithms.advantages import FLAG, advantages
from vlmrl.algorithms.losses import PolicyLoss, policy_loss
from vlmrl.config.built_in import ESTIMATORS, POLICY_LOSSES
from vlmrl.system.user_function import load_function

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_estimator_reinforces_responses_above_the_group_mean() -> None:
    estimator = load_function(f"{EXAMPLES}/own_algorithm.py:best_of_group", FLAG)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    sampled = torch.tensor([[False, True, True]] * 8)
    result = advantages(rewards, sampled, estimator=estimator).advantages
    assert result[:4].tolist() == [[0.0, 0.5, 0.5], [0.0] * 3, [0.0] * 3, [0.0, 0.5, 0.5]]
    assert result[4:].count_nonzero() == 0


def test_the_loss_is_a_policy_gradient_with_a_squared_penalty() -> None:
    loss = load_function(f"{EXAMPLES}/own_algorithm.py:squared_ratio", "actor.policy_loss_type")
    knobs = PolicyLoss(aggregation="token", max_tokens=2, kind=loss, clip_low=0.2, clip_high=0.25)
    old = torch.tensor([[-1.0, -2.0, -5.0]])
    logprobs = torch.tensor([[-1.0, -2.5, 3.0]], requires_grad=True)
    terms = policy_loss(
        knobs,
        logprobs=logprobs,
        old=old,
        rollout=None,
        advantages=torch.tensor([[2.0, -1.0, 7.0]]),
        sampled=torch.tensor([[True, True, False]]),
        owner=torch.zeros(1, 3, dtype=torch.long),
    )
    # -1 * 2; then e^-0.5 + 0.25 / (2 * 0.25).
    expected = [-2.0, float(torch.tensor(-0.5).exp()) + 0.5]
    assert terms.losses[0, :2].tolist() == pytest.approx(expected)
    terms.losses[0, :2].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-2.0, expected[1] - 0.5 - 2.0, 0.0])


@pytest.mark.parametrize(
    ("response", "reward"),
    [("7", 1.0), (" 8\n", 0.5), ("5", 1 / 3), ("-7", 0.0), ("seven", 0.0), ("²", 0.0), ("", 0.0)],
)
def test_the_reward_falls_with_the_distance(response: str, reward: float) -> None:
    reward_function = load_function(f"{EXAMPLES}/own_reward.py:close_counts", "reward.remote_url")
    assert reward_function(response=response, label="7") == pytest.approx(reward)


def compare(name: str = "compare_algorithms") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_comparison_plots_curves_and_names_algorithms_without_a_gain(tmp_path: Path) -> None:
    script, metric = compare(), "eval/visual_math/pass@1"
    records = [{"step": 0, metric: 0.25}, {"step": 1, "time/step_s": 3.0}, {"step": 2, metric: 0.5, "time/step_s": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rises = script.read_curve(tmp_path / "metrics.jsonl")
    assert rises == {"step": [0, 2], "accuracy": [0.25, 0.5], "seconds": [3.0, 1.0]}
    curves = {"ppo": rises, "gspo": rises | {"accuracy": [0.5, 0.5]}}
    script.draw(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert script.show(curves, tmp_path) == ["GSPO"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ppo"] == {"before": 0.25, "after": 0.5, "seconds_per_step": 3.0}


@pytest.mark.parametrize(("after", "code"), [(0.5, 0), (0.25, 1)])
def test_the_comparison_fails_if_an_algorithm_does_not_learn(
    after: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, metric = compare(), "eval/visual_math/pass@1"
    for name in script.RECIPES:
        (tmp_path / name / "model").mkdir(parents=True)
        last = after if name == "rloo" else 1.0
        records = [{"step": 0, metric: 0.25}, {"step": 1, metric: last, "time/step_s": 1.0}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(script, "warm_start", lambda out: out)
    monkeypatch.setattr("sys.argv", ["compare_algorithms.py", "--out", str(tmp_path)])
    assert script.main() == code


@pytest.mark.parametrize(("after", "code"), [(0.75, 0), (0.30, 1)])
def test_the_comparison_of_preferences_fails_if_a_loss_rises_by_no_more_than_noise(
    after: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    script = compare("compare_preferences")
    for name in script.LOSSES:
        (tmp_path / name / "model").mkdir(parents=True)
        last = after if name == "kto" else 1.0
        records = [{"step": 0, script.METRIC: 0.25}, {"step": 1, script.METRIC: last, "time/step_s": 1.0}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(script, "begin", lambda out: out)
    monkeypatch.setattr("sys.argv", ["compare_preferences.py", "--out", str(tmp_path)])
    assert script.main() == code
    last_line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last_line == json.loads((tmp_path / "summary.json").read_text())
    assert last_line["kto"] == {  # 502 of 1,024 single responses are right, and their questions are asked
        "before": 0.25,
        "after": after,
        "standard_error": pytest.approx((after * (1 - after) / 502) ** 0.5, abs=6e-5),
        "rises": code == 0,
        "seconds_per_step": 1.0,
    }
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_guide_has_a_line_with_recipes_for_every_estimator_and_loss() -> None:
    rows = [
        row for row in (EXAMPLES.parent / "vlmrl/algorithms/README.md").read_text().splitlines() if row.startswith("| ")
    ]
    for flag, names in (("algo.advantage.estimator", ESTIMATORS), ("actor.policy_loss_type", POLICY_LOSSES)):
        for name in names:
            if name == "ppo":  # the loss of every line that names no other
                continue
            (row,) = [row for row in rows if f"`--{flag} {name}`" in row]
            recipe = "ppo" if name == "gae" else name
            assert f"(../../examples/counting_tiny/{recipe}.yaml)" in row
            assert row.count("(https://arxiv.org/abs/") >= 1
            assert f"(../../examples/geometry3k_7b_8gpu/{recipe}.yaml)" in row
