import io

import pytest
from rich.console import Console

from vlmrl.observe import panel


def drawn(*, width: int = 100, is_unicode: bool = True, **changes: object) -> list[str]:
    view = panel.View(
        title="vlmrl rl",
        place="runs/a",
        elapsed="4 min 12 s",
        step=12,
        total_steps=60,
        left="left 3 min 20 s",
        phase=panel.Phase("rollout", 97, 128, "5 s"),
        curve=panel.Curve("reward/mean", "reward", [0.25, 0.5, 1.0]),
        evaluations={"math: pass@1": ([0.42, 0.7], "42.0% at step 0 -> 70.0% at step 10")},
        checks=["engine = trainer (mean gap 1.2e-06)", "images are seen"],
        numbers=["loss 0.01", "tokens/s 1,234"],
        warnings=["reward/failed_infrastructure 3: see logs/rewards.log"],
    )
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(panel.draw(view._replace(**changes), width=width, is_unicode=is_unicode))  # type: ignore[arg-type]
    return [" ".join(line.strip("│╭╮╰╯─\n ").split()) for line in out.getvalue().splitlines()]


def test_the_panel_shows_phase_curves_checks_and_time() -> None:
    lines = drawn()
    assert lines[0] == "vlmrl rl runs/a"
    assert lines[1].startswith("step ━")
    assert lines[1].endswith("12/60 left 3 min 20 s")
    assert lines[2].endswith("97/128 5 s")
    assert sum(char in "━╸" for char in lines[2]) == 25, "97 / 128 of 33 columns"
    assert lines[3:-1] == [
        "reward ▁▃█ 0.250 -> 1.000",
        "math: pass@1 ▁█ 42.0% at step 0 -> 70.0% at step 10",
        "checks ✓ engine = trainer (mean gap 1.2e-06) ✓ images are seen",
        "now loss 0.01 tokens/s 1,234",
        "look at reward/failed_infrastructure 3: see logs/rewards.log",
    ]
    assert lines[-1].endswith("4 min 12 s")


def test_a_terminal_without_unicode_gets_letters() -> None:
    lines = drawn(is_unicode=False)
    assert "reward _-# 0.250 -> 1.000" in lines
    assert "checks ok: engine = trainer (mean gap 1.2e-06) ok: images are seen" in lines


def test_text_of_users_is_no_markup() -> None:
    lines = drawn(place="runs/[bold]x[/nothing]", evaluations={"[red]a: pass@1": ([0.5], "50.0% at step 0")})
    assert lines[0] == "vlmrl rl runs/[bold]x[/nothing]"
    assert any(line.startswith("[red]a: pass@1") for line in lines)


def test_a_run_without_steps_shows_its_phase_only() -> None:
    lines = drawn(
        total_steps=0, left="", curve=None, evaluations={}, checks=(), numbers=(), warnings=(),
        phase=panel.Phase("eval", 0, 0, "7 s"),
    )  # fmt: skip
    assert lines[1:-1] == ["eval 7 s"]


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([], ""),
        ([0.0, 1.0, 0.5], "▁█▅"),
        ([3.0, 3.0], "▄▄"),
        ([float("nan"), 1.0, 2.0, float("inf")], "▁█"),
        ([0.0, 0.0, 7.0, 7.0, 1.0, 3.0, 0.0, 0.0], "▁█▃▁"),
    ],
)
def test_a_sparkline_goes_from_the_smallest_to_the_largest_value(values: list[float], curve: str) -> None:
    assert panel.sparkline(values, width=4) == curve


def test_the_worst_figure_of_each_check_is_shown() -> None:
    checks = panel.Checks()
    assert checks.lines() == []
    checks.add({"sync/logprob_diff_mean": 2e-6, "verify/images/engine_effect": 0.5, "sync/readback_layers": 9.0})
    checks.add({"sync/logprob_diff_mean": 1e-6, "verify/adapters/gap": 3e-7, "reward/mean": 1.0})
    assert checks.lines() == [
        "engine = trainer (mean gap 2.0e-06)",
        "images are seen",
        "adapters arrived (gap 3.0e-07)",
        "weights read back",
    ]


def test_engine_and_trainer_that_differ_are_not_shown_as_equal() -> None:
    checks = panel.Checks()
    checks.add({"sync/logprob_diff_mean": 0.4, "sync/readback_layers": 9.0})
    checks.add({"sync/logprob_diff_mean": 1e-3})
    assert checks.lines() == ["weights read back"]


def test_the_curve_of_a_run_is_its_reward_else_its_loss() -> None:
    assert panel.curve_of({"policy/loss": 1.0, "reward/mean": 0.5}) == panel.Curve("reward/mean", "reward")
    assert panel.curve_of({"policy/loss": 1.0}) == panel.Curve("policy/loss", "loss")
    assert panel.curve_of({"eval/a/loss": 1.0}) is None


def test_metrics_beyond_their_bounds_are_named_and_the_rest_is_counted() -> None:
    assert panel.warnings_of({"reward/mean": 0.0, "group/constant_fraction": 0.5}) == []
    names = ("group/constant_fraction", "response/truncated_fraction", "policy/clip_fraction", "policy/kl_old", "own/x")
    lines = panel.warnings_of(dict.fromkeys(names, 0.95))
    assert lines[0] == "group/constant_fraction 0.95: few prompts teach: they are too easy or too hard for this model"
    assert lines[-1] == "and 1 more in metrics.jsonl"
    assert len(lines) == 4
