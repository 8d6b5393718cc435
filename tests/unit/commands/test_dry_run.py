"""Dry runs: the plan that they print, and the errors that they find."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vlmrl import cli
from vlmrl.commands import forecast
from vlmrl.commands import run as run_module
from vlmrl.config.load import load
from vlmrl.config.stages import RmConfig, SftConfig
from vlmrl.models import tiny
from vlmrl.models.max_length import max_positions

COUNTING = "visual_math?families=count&difficulty=1&pixels=56&size=32"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "micro", size="micro"))


@pytest.fixture
def no_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward functions do not start, each time with imports of a second."""
    monkeypatch.setattr(run_module, "check_functions", lambda reward, **_: None)
    monkeypatch.setattr(forecast, "format_rewards", lambda config, prompt: [])


def dry_run(verb: str, model: str, out: Path, *flags: str) -> int:
    common = ["--actor.model_name_or_path", model, "--ckpt.output_dir", str(out), "--dry-run"]
    data = ["--data.prompt_dataset", COUNTING, "--train.batch_size", "16"]
    sampling = ["--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4"] if verb == "rl" else []
    return cli.main([verb, *common, *data, *sampling, *flags])


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("rl", model, tmp_path / "out", "--train.colocate_all", "--eval.dataset", COUNTING) == 0
    shown = capsys.readouterr().out
    assert "placement" in shown
    assert "evaluation: visual_math" in shown
    assert "How many circles?" in shown
    assert "checkpoints: none, so a stopped run starts again at step 1" in shown
    assert not (tmp_path / "out").exists()


def test_a_dry_run_names_labels_that_no_response_can_match(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    labels = ["4", "145°", "\\\\frac{1}{", "x^2 +", "", "\\\\sqrt{", "\\\\frac{1}{2}"]
    file.write_text("".join(f'{{"input": "q", "label": "{label}"}}\n' for label in labels))
    data = ["--data.prompt_dataset", str(file), "--data.max_dropped_fraction", "1.0"]
    assert dry_run("rl", model, tmp_path / "out", *data) == 0
    shown = capsys.readouterr().out
    message = next(line for line in shown.splitlines() if line.startswith("labels: "))
    assert "4 of the first 7 rows cannot be used by reward.functions" in message
    assert message.count("(it ") == 3
    assert "dropped, label unusable: '': it is empty" in shown
    assert dry_run("rl", model, tmp_path / "out", *data, "--reward.functions", "{format: 1.0}") == 0
    assert "can be used" in capsys.readouterr().out


def test_a_dry_run_of_sft_names_responses_that_are_no_labels(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_functions: None
) -> None:
    file = tmp_path / "rows.jsonl"
    responses = ["One circle. Two circles. So there are two.", "2"]
    file.write_text("".join(json.dumps({"input": "q", "answer": text}) + "\n" for text in responses))
    data = ["--data.prompt_dataset", COUNTING, "--eval.dataset", str(file), "--eval.generate_enable", "true"]
    assert dry_run("sft", model, tmp_path / "out", *data) == 0
    assert "1 of 2 rows have labels that reward.functions math cannot use" in capsys.readouterr().out


@pytest.mark.parametrize("way", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("verb", "flag", "rows", "message"),
    [
        (
            "rl",
            "data.prompt_dataset",
            [{"input": "q", "gold": "4"}],
            "no column 'label' (data.label_key), which reward.",
        ),
        ("rl", "eval.dataset", [{"input": "q", "answer": "4"}], "did you mean --data.label_key answer?"),
        ("eval", "eval.dataset", [{"input": "q"}], "which reward.functions math needs"),
        ("sft", "data.prompt_dataset", [{"input": "q"}], "no answer to train on"),
        ("rm", "data.prompt_dataset", [{"input": "q", "chosen": "a"}], "no column 'rejected' (data.rejected_key)"),
        ("rl", "data.prompt_dataset", [{"input": "<image>?", "label": 1, "image_path": "a.png"}], "to image_path, or"),
    ],
)
def test_missing_columns_are_reported_before_anything_starts(
    way: list[str], verb: str, flag: str, rows: Any, message: str, model: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--actor.model_name_or_path", model, "--ckpt.output_dir", str(tmp_path / "out"), *way]
    words += [] if verb == "eval" or flag == "data.prompt_dataset" else ["--data.prompt_dataset", COUNTING]
    assert cli.main([verb, *words, f"--{flag}", str(tmp_path / "rows.jsonl")]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_label_that_a_users_function_requires_is_checked(model: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "q", "gold": "4"}')
    (tmp_path / "mine.py").write_text("def score(response, label):\n    return 1.0\n")
    words = ["--data.prompt_dataset", str(tmp_path / "rows.jsonl"), "--reward.remote_url", f"{tmp_path}/mine.py:score"]
    assert dry_run("rl", model, tmp_path / "out", *words) == 2
    assert "no column 'label' (data.label_key), which reward.remote_url" in capsys.readouterr().err


def test_columns_that_a_users_function_requires_are_checked_in_every_dataset(
    model: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "q", "label": "4", "level": 1}\n' * 8)
    (tmp_path / "test.jsonl").write_text('{"input": "q", "label": "4"}\n')
    (tmp_path / "mine.py").write_text("def score(prompts, completions, answer, level, seldom=0):\n    return [1.0]\n")
    words = ["--data.prompt_dataset", str(tmp_path / "rows.jsonl"), "--reward.remote_url", f"{tmp_path}/mine.py:score"]
    words += ["--train.max_steps", "1"]
    assert dry_run("rl", model, tmp_path / "out", *words) == 0, capsys.readouterr().err
    assert dry_run("rl", model, tmp_path / "out", *words, "--eval.dataset", str(tmp_path / "test.jsonl")) == 2
    message = "dataset test has no column 'level', which reward.remote_url needs; it has: input, label"
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_functions")
def test_a_dry_run_counts_evaluation_rows_without_a_label(model: str, tmp_path: Path, capsys: Any) -> None:
    rows = [{"input": "q", "label": "4"}, {"input": "q", "label": None}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert dry_run("rl", model, tmp_path / "out", "--eval.dataset", str(tmp_path / "rows.jsonl")) == 2
    assert "1 of the first 2 rows cannot be used (1 no label; the last: rows:1" in capsys.readouterr().err


@pytest.mark.usefixtures("no_functions")
def test_a_dry_run_shows_what_is_held_out(model: str, tmp_path: Path, capsys: Any) -> None:
    assert dry_run("rl", model, tmp_path / "out", "--data.eval_fraction", "0.25") == 0
    table = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("│training│24│") for line in table)
    assert any(line.startswith("│evaluation:visual_math│8│") for line in table)


@pytest.mark.usefixtures("no_functions")
def test_evaluation_sets_need_not_have_the_columns_of_the_training_rows(
    model: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"input": "q{n}", "gold": "{n}"}}\n' for n in range(40)))
    words = ["--data.prompt_dataset", f"{tmp_path}/rows.jsonl,arithmetic?size=20", "--data.label_key", "gold"]
    words += ["--data.eval_fraction", "0.2", "--eval.dataset", "visual_math?families=count&difficulty=1&size=4"]
    assert dry_run("rl", model, tmp_path / "out", *words) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out.replace(" ", "")
    assert all(f"evaluation:{name}" in shown for name in ("rows", "arithmetic", "visual_math"))


def test_a_dry_run_of_supervised_training_checks_the_responses(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("sft", model, tmp_path / "out") == 0
    assert "dry run: nothing was started" in capsys.readouterr().out


def test_a_dry_run_of_a_reward_model_reads_pairs_or_steps(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [{"input": f"{n}?", "response": "a;b", "labels": [1, n % 2]} for n in range(8)]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, steps)))
    pairs = "visual_preferences?families=count&difficulty=1&pixels=56&size=8"
    common = ["--train.batch_size", "4", "--data.prompt_dataset"]
    assert dry_run("rm", model, tmp_path / "out", *common, pairs) == 0, capsys.readouterr().err
    assert "dry run: nothing was started" in capsys.readouterr().out
    process = ["--rm.kind", "process", "--data.output_key", "response", "--data.label_key", "labels"]
    words = [*common, str(tmp_path / "steps.jsonl"), *process]
    assert dry_run("rm", model, tmp_path / "out", *words, "--rm.process_separator", ";") == 0, capsys.readouterr().err
    assert dry_run("rm", model, tmp_path / "out", *words) == 2
    assert "2 labels for 1 steps; it has no rm.process_separator" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["sft", "rm"])
def test_rows_that_may_exceed_the_positions_of_the_model_are_named_before_a_run_starts(
    verb: str, model: str, tmp_path: Path
) -> None:
    limit = max_positions(model)
    assert limit is not None
    pairs = "visual_preferences?families=count&difficulty=1&pixels=56&size=8"
    kind: Any = {"sft": SftConfig, "rm": RmConfig}[verb]

    def warnings(max_len: int) -> list[str]:
        words = ["--actor.model_name_or_path", model, "--data.prompt_dataset", pairs if verb == "rm" else COUNTING]
        config = load(kind, [*words, "--ckpt.output_dir", str(tmp_path / "out"), "--data.max_len", str(max_len)])
        return [line for line in run_module.prepare(config, dry_run=False).warnings if "positions" in line]

    assert warnings(limit) == []
    [line] = warnings(limit + 1)
    assert line.startswith(f"warning: data.max_len {limit + 1} is above the model's {limit} positions")


def judged_run(model: str, folder: Path, labels: list[Any], *flags: str) -> int:
    rows = [{"input": f"{n}?", "response": "a", "good": label} for n, label in enumerate(labels)]
    (folder / "judged.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ["--data.prompt_dataset", str(folder / "judged.jsonl"), "--train.batch_size", "4", "--dpo.loss", "kto"]
    columns = ["--data.output_key", "response", "--data.label_key", "good"]
    return dry_run("dpo", model, folder / "out", *data, *columns, *flags)


def test_a_dry_run_of_kto_finds_labels_that_are_no_judgements(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged_run(model, tmp_path, [True, False] * 4) == 0, capsys.readouterr().err
    assert judged_run(model, tmp_path, ["yes", True, False, False]) == 2
    assert "1 label unusable; the last: judged:0" in capsys.readouterr().err


def test_a_dry_run_of_kto_finds_that_one_class_is_missing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged_run(model, tmp_path, [True] * 8) == 2
    assert "all of the 8 rows read are desirable by column 'good'" in capsys.readouterr().err


def test_a_dry_run_of_kto_asks_only_questions_with_a_judgement(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input": f"{n}?", "response": "a", "good": label} for n, label in enumerate(["yes", True, False, True])]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--eval.dataset", str(tmp_path / "test.jsonl"), "--eval.generate_enable", "--reward.functions", "exact"]
    flags += ["--data.max_dropped_fraction", "0.5", "--train.colocate_all"]
    assert judged_run(model, tmp_path, [True, False] * 4, *flags) == 0, capsys.readouterr().err
    assert "evaluation: test" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--vllm.num_engines", "999", "--train.colocate_all"], "vllm requires 999"),
        (["--actor.model_name_or_path", "/no/such/model"], "there is no folder /no/such/model"),
        (["--data.label_key", "solution"], "solution"),
        (["--data.prompt_dataset", "visual_maths"], "visual_math"),
        (["--rollout.n_samples_per_prompt", "1", "--train.batch_size", "4"], "rollout.n_samples_per_prompt"),
        (["--ds.lora.rank", "8", "--ds.lora.target_modules", "q_prog"], "did you mean q_proj?"),
        (["--actor.optim", "adam_8bit"], "actor.optim adam_8bit"),
        (["--rollout.batch_size", "1280"], "do not fill one batch of 1280: lower --rollout.batch_size"),
        (
            ["--ds.lora.rank", "8", "--ds.lora.target_modules", "qkv", "--actor.freeze_visual_encoder"],
            "of the frozen vision tower",
        ),
    ],
)
@pytest.mark.usefixtures("no_functions")
def test_settings_that_cannot_work_are_one_line_and_exit_code_2(
    flags: list[str], line: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refusal(dry_run("rl", model, tmp_path / "out", *flags), line, capsys)


def test_a_reward_function_whose_file_is_missing_is_one_line_and_exit_code_2(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = dry_run("rl", model, tmp_path / "out", "--reward.remote_url", "/no/such/file.py:score")
    check_refusal(code, "/no/such/file.py", capsys)


def check_refusal(code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code == 2
    shown = capsys.readouterr().err.strip()
    assert line in shown
    assert shown.count("\n") == 0
    assert "Traceback" not in shown


def test_a_dry_run_describes_the_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("rl", model, tmp_path / "out", "--train.colocate_all", "--actor.num_nodes", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    for start in (
        "a dry run sees only this machine: planned for 2 machines like it",
        "first prompt (visual_math:",
        "plan: 8 steps of 4 prompts x 4 responses = 16 samples, 1 update each of 16 samples; 1 pass over 32 rows",
        "trains: language model and vision tower and projector",
        "rows: of the first 32, none is dropped; the longest prompt has ",
        "rewards on visual_math:",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_machines_are_waited_for_only_where_they_can_join(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("rl", model, tmp_path / "out", "--train.wait_nodes_s", "60") == 2
    assert "train.wait_nodes_s waits for machines of a cluster, and RAY_ADDRESS names none" in capsys.readouterr().err


@pytest.mark.usefixtures("no_functions")
def test_a_dry_run_does_not_reject_a_cluster_by_this_machine(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert dry_run("rl", model, tmp_path / "out", "--vllm.num_engines", "999", "--train.colocate_all") == 0
    shown = capsys.readouterr().out
    assert "warning: placement: vllm requires 999" in shown
    assert "a dry run does not contact the cluster of RAY_ADDRESS" in shown


def test_a_dry_run_of_an_evaluation_shows_its_first_prompt_and_its_rewards(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--actor.model_name_or_path",
        model,
        "--eval.dataset",
        COUNTING,
        "--ckpt.output_dir",
        str(tmp_path / "out"),
    ]
    assert cli.main(["eval", "--dry-run", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("first prompt (visual_math:0)") for line in lines)
    assert any(line.startswith("rewards on visual_math:0: ") and "math 1, total 1" in line for line in lines)
    assert cli.main(["eval", "--dry-run", *flags, "--data.max_len", "8000"]) == 2
    assert "8192 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--rollout.batch_size", "64", "--train.batch_size", "64"], "32 rows, 1 times over, do not fill one batch"),
        (["--data.max_len", "8000"], "are 9024 tokens, and .* has 8192 positions: lower one of them"),
        (["--logger.wandb.project", "p"], "WANDB_API_KEY|wandb is not installed"),
        (["--logger.tensorboard_dir", "/dev/null/tb"], "/dev/null is not a folder.* set --logger.tensorboard_dir"),
    ],
)
@pytest.mark.usefixtures("no_functions")
def test_errors_that_would_end_a_run_later_end_the_dry_run(
    flags: list[str],
    line: str,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert dry_run("rl", model, tmp_path / "out", "--train.colocate_all", *flags) == 2
    assert re.search(line, capsys.readouterr().err)


def test_a_folder_that_holds_another_run_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert dry_run("rl", model, tmp_path) == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.usefixtures("no_functions")
def test_a_best_model_by_another_metric_is_refused_before_anything_starts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("# Written by vlmrl: vlmrl rl --config config.yaml repeats the run\n")
    (tmp_path / "checkpoints/step_000002").mkdir(parents=True)
    (tmp_path / "best").mkdir()
    (tmp_path / "best/best.json").write_text('{"metric": "eval/visual_math/reward", "value": 1.0, "step": 2}')
    flags = ["--eval.dataset", COUNTING, "--eval.steps", "1", "--ckpt.best_metric_key", "eval/visual_math/pass@1"]
    assert dry_run("rl", model, tmp_path, *flags, "--ckpt.load_enable") == 2
    assert "was chosen by eval/visual_math/reward" in capsys.readouterr().err


@pytest.mark.parametrize("way", [[], ["--dry-run"]])
def test_models_are_checked_before_anything_starts(
    way: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--actor.model_name_or_path", model, "--data.prompt_dataset", COUNTING, "--ckpt.output_dir"]
    assert cli.main(["rl", *words, str(tmp_path / "out"), "--reward.model_name_or_path", "/no/such", *way]) == 2
    assert "reward.model_name_or_path: there is no folder /no/such" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
