"""`make ladder` with commands that only write their metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from vlmrl.commands import ladder
from vlmrl.config.load import load
from vlmrl.config.verb_list import VERBS
from vlmrl.errors import VlmrlError

ACCURACY = {"eval_sft": 0.42, "eval_ppo": 0.75, "eval_dpo": 0.6}
KINDS = {kind.verb: kind for kind in VERBS}


def scripted(words: Sequence[str]) -> None:
    """Write the metrics of a command."""
    out = Path(words[list(words).index("--ckpt.output_dir") + 1])
    out.mkdir(parents=True)
    records: list[dict[str, float]] = [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.4}]
    if words[0] == "rm":
        records = [{"step": step, "eval/visual_preferences/accuracy": 0.5 + step / 1000} for step in (0, 200, 400)]
    if words[0] == "eval":
        records = [{"step": 0, "eval/visual_math/pass@1": ACCURACY[out.name]}]
    (out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_result_is_one_line_and_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "ladder"
    assert ladder.climb(runs, scripted) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert any("ppo/report.html" in line for line in lines)
    assert {name: result[name] for name in ("sft", "ppo", "dpo")} == {"sft": 0.42, "ppo": 0.75, "dpo": 0.6}
    assert result["reward_model"] == pytest.approx(0.9)
    assert list(result["seconds_of_stages"]) == ["sft", "rm", "ppo", "dpo", *ACCURACY]
    assert (runs / "ladder.png").stat().st_size > 10_000
    assert (runs / "start" / "config.json").exists()
    assert ladder.climb(runs, scripted) == 0, "the results of an earlier one are set aside"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_stage_that_fails_ends_the_ladder(tmp_path: Path) -> None:
    called = []

    def run(words: Sequence[str]) -> None:
        called.append(words[0])
        if words[0] == "rm":
            raise VlmrlError("vlmrl rm ended with exit code 2")
        scripted(words)

    with pytest.raises(VlmrlError):
        ladder.climb(tmp_path / "ladder", run)
    assert called == ["sft", "rm"]


@pytest.mark.parametrize("stage", ladder.stages(ladder.RUNS), ids=lambda stage: stage.folder)
def test_the_settings_of_every_stage_load(stage: ladder.Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    verb, *words = stage.command(ladder.RUNS)
    load(KINDS[verb], words)


def test_each_stage_starts_from_what_an_earlier_one_wrote() -> None:
    written = {ladder.RUNS / "start"}
    for stage in ladder.stages(ladder.RUNS):
        words = stage.command(ladder.RUNS)
        models = [Path(words[place + 1]) for place, word in enumerate(words) if word.endswith("model_name_or_path")]
        assert models
        assert written.issuperset(models)
        written.add(ladder.RUNS / stage.folder / "model")
