import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from vlmrl.config.load import load
from vlmrl.config.stages import DpoConfig, RmConfig, SftConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.hub.model_card import TrainedBy, changed_settings, write_cards
from vlmrl.observe.run_folder import RunFolder

RECORDS: list[dict[str, Any]] = [
    {"step": 0, "eval/geometry3k/pass@1": 0.25, "eval/geometry3k/hard/pass@1": 0.1},
    {"step": 20, "eval/geometry3k/pass@1": 0.5, "sync/logprob_diff_max": 3e-6, "time/step_s": 3600.0},
    {"step": 40, "eval/geometry3k/pass@1": 0.45, "sync/logprob_diff_max": 1e-6, "time/step_s": 3600.0},
]


def run_folder(root: Path, *models: str, records: list[dict[str, Any]] = RECORDS) -> RunFolder:
    """A finished run of 40 steps with these models."""
    root.mkdir(exist_ok=True)
    run = RunFolder(root)
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    run.curves.write_bytes(b"png")
    run.parameters.write_text("part\ttrainable\tall\nvision\t0\t600\nlanguage\t1000\t1000\n")
    for model in models:
        (root / model).mkdir()
    return run


def card(root: Path, model: str) -> ModelCard:
    """A card, whose metadata the Hub's own library reads."""
    return ModelCard((root / model / "README.md").read_text())


def settings(kind: type[VerbConfig], *words: str) -> Any:
    return load(kind, ["--data.prompt_dataset", "geometry3k", *words])


def rl(*words: str) -> TrainedBy:
    config: TrainedBy = settings(RlConfig, "--actor.model_name_or_path", "owner/model", *words)
    return config


def test_the_card_of_a_run(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "my-run", "model")
    write_cards(rl("--eval.dataset", "geometry3k", "--train.seed", "7"), run, pytest.fail)
    written = card(run.root, "model")
    data = written.data.to_dict()
    assert data["base_model"] == "owner/model"
    assert data["datasets"] == ["hiyouga/geometry3k"]
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "image-text-to-text"
    assert data["tags"] == ["vlmrl", "reinforcement-learning", "grpo"]
    (result,) = written.data.eval_results or []
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("geometry3k", "pass@1", 0.45)
    assert "# my-run" in written.text
    assert "| `geometry3k/pass@1` | 25.0% (step 0) | **45.0%** (step 40) |" in written.text
    assert "| 3e-06 | `sync/logprob_diff_max` |" in written.text
    assert "after 40 steps, from `owner/model`" in written.text
    assert "The 2 logged steps of 40 took 2 hours." in written.text
    assert "stops where their log-probs differ by more than 0.1 on average." in written.text
    assert "| vision | 0 | 600 |" in written.text
    assert "AutoModelForImageTextToText" in written.text
    assert (run.model / "curves.png").read_bytes() == b"png"
    assert "![Curves of the run](curves.png)" in written.text


def test_a_card_says_how_long_a_run_took_whose_steps_are_all_logged(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "model")
    records = [{"step": step, "time/step_s": 15.0} for step in range(4)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    write_cards(rl(), run, pytest.fail)
    assert "The run took 1 minutes." in card(run.root, "model").text


def test_the_settings_of_a_card_repeat_the_changes(tmp_path: Path) -> None:
    words = ("--train.seed", "7", "--actor.eps_clip_low_high", "0.2", "0.28", "--data.system_prompt", "Use ``` or 1/2.")
    config = rl(*words, "--ckpt.output_dir", "/secret/place", "--logger.wandb.project", "mine")
    run = run_folder(tmp_path / "run", "model")
    write_cards(config, run, pytest.fail)
    text = card(run.root, "model").text
    block = text.partition("````yaml\n")[2].partition("\n````")[0]
    assert yaml.safe_load(block) == {
        "actor.eps_clip_low_high": [0.2, 0.28],
        "actor.model_name_or_path": "owner/model",
        "data.prompt_dataset": "geometry3k",
        "data.system_prompt": "Use ``` or 1/2.",
        "train.seed": 7,
    }
    file = tmp_path / "settings.yaml"
    file.write_text(block)
    assert changed_settings(load(RlConfig, ["--config", str(file)])) == changed_settings(config)


def test_the_best_model_has_the_figures_of_its_step(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "model", "best")
    (run.best / "best.json").write_text('{"metric": "eval/geometry3k/pass@1", "value": 0.5, "step": 20}')
    write_cards(rl(), run, pytest.fail)
    best = card(run.root, "best").text
    assert "**50.0%** (step 20)" in best
    assert "the best by `eval/geometry3k/pass@1`" in best
    assert "after 20 steps" in best
    assert "**45.0%** (step 40)" in card(run.root, "model").text


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "adapter", "adapter_ema", "critic")
    write_cards(rl("--ds.lora.rank", "8", "--ds.load_in_4bit"), run, pytest.fail)
    written = card(run.root, "adapter")
    assert written.data.to_dict()["library_name"] == "peft"
    assert "qlora" in written.data.tags
    assert 'PeftModel.from_pretrained(model, "path/to/this/folder")' in written.text
    assert "in 4 bits" in written.text
    assert "Moving average" in card(run.root, "adapter_ema").text
    critic = card(run.root, "critic")
    assert "--critic.model_name_or_path" in critic.text
    assert not critic.data.eval_results


def test_other_stages_have_cards(tmp_path: Path) -> None:
    base = tmp_path / "warm" / "model"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nbase_model: owner/first\nlicense: apache-2.0\ntags: [vlmrl]\n---\n")
    for kind, name, tag in ((SftConfig, "sft", "sft"), (DpoConfig, "dpo", "dpo"), (RmConfig, "rm", "reward-model")):
        run = run_folder(tmp_path / name, "model", records=[{"step": 5, "policy/loss": 1.0}])
        run.parameters.unlink()
        run.curves.unlink()
        write_cards(settings(kind, "--actor.model_name_or_path", str(base)), run, pytest.fail)
        written = card(run.root, "model")
        assert written.data.tags == ["vlmrl", tag]
        assert written.data.base_model == "owner/first"
        assert written.data.license == "apache-2.0"
        assert "which was trained from `owner/first`" in written.text
        assert "no rollout engine to compare" in written.text
        assert "has not evaluated" in written.text
        assert str(tmp_path) not in str(written)
        assert ("--reward.model_name_or_path" in written.text) == (kind is RmConfig)
        assert (written.data.pipeline_tag == "text-classification") == (kind is RmConfig)


def test_nothing_private_is_in_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "geheim-0123456789")
    monkeypatch.setenv("VLMRL_RM_TOKEN", "token-0123456789")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a", "label": "b"}\n')
    config: TrainedBy = load(
        RlConfig,
        [
            *("--actor.model_name_or_path", str(tmp_path / "base")),
            *("--data.prompt_dataset", f"{file}?size=3"),
            *("--data.system_prompt", "geheim-0123456789 <script>alert(1)</script>"),
            *("--reward.remote_url", "http://10.1.2.3:8000/score"),
        ],
    )
    run = run_folder(tmp_path / "run", "model")
    write_cards(config, run, pytest.fail)
    text = (run.model / "README.md").read_text()
    for private in (str(tmp_path), "geheim-0123456789", "token-0123456789", "10.1.2.3"):
        assert private not in text
    assert "…/rows.jsonl" in text
    assert text.index("```yaml") < text.index("<script>"), "text of the user is in code only"


def test_a_card_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "model")
    (run.model / "README.md").mkdir()
    lines: list[object] = []
    write_cards(rl(), run, lines.append)
    (line,) = lines
    assert "README.md could not be written" in str(line)


def test_only_models_that_need_a_card_get_one(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "model", "critic")
    (run.model / "README.md").write_text("after 60 steps")
    write_cards(rl(), run, pytest.fail, needs_card=lambda folder: folder == run.critic)
    assert (run.model / "README.md").read_text() == "after 60 steps"
    assert not (run.model / "curves.png").exists()
    assert "after 40 steps" in card(run.root, "critic").text


@pytest.mark.parametrize("record", ["{", "[]", '{"metric": "eval/toy/pass@1"}', '{"metric": 1, "step": "x"}'])
def test_a_record_of_the_best_model_that_cannot_be_read_is_one_line(record: str, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "model", "best", "critic")
    (run.best / "best.json").write_text(record)
    lines: list[object] = []
    write_cards(rl(), run, lines.append)
    (line,) = lines
    assert f"{run.best / 'README.md'} could not be written" in str(line)
    assert "\n" not in str(line)
    assert (run.model / "README.md").exists()
    assert (run.critic / "README.md").exists()


def test_the_best_model_may_be_the_one_before_training(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "best")
    (run.best / "best.json").write_text('{"metric": "eval/geometry3k/pass@1", "value": 0.25, "step": 0}')
    write_cards(rl(), run, pytest.fail)
    text = card(run.root, "best").text
    assert "after 0 steps, from `owner/model`" in text
    assert "**25.0%** (step 0)" in text


def test_a_check_that_was_no_number_is_not_hidden(tmp_path: Path) -> None:
    records = [{"step": 1, "sync/logprob_diff_max": None}, {"step": 2, "sync/logprob_diff_max": 1e-6}]
    run = run_folder(tmp_path / "run", "model", records=records)
    write_cards(rl(), run, pytest.fail)
    assert "| nan | `sync/logprob_diff_max` |" in card(run.root, "model").text


def test_a_run_without_models_has_no_card(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    write_cards(rl(), run, pytest.fail)
    assert not list(run.root.rglob("README.md"))
