"""`vlmrl generate` with engines that are scripted: what is sampled again after a kill, and what is refused."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vlmrl import cli
from vlmrl.cluster.role_settings import source_settings
from vlmrl.commands.generate import (
    _complete,
    _failures,
    _write,
    check_output,
    check_same_settings,
    output_of,
    remember_output,
    settings_of,
)
from vlmrl.config.load import load
from vlmrl.config.verb_list import VERBS
from vlmrl.config.verbs import GenerateConfig
from vlmrl.data.source import Source
from vlmrl.errors import ConfigError, DataError
from vlmrl.models import tiny
from vlmrl.observe.run_folder import RunFolder
from vlmrl.system.journal import Journal
from vlmrl.types import Group, Media, Prompt, Rollout, Sampling, Score


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "micro", size="micro"))


class Engines:
    """Responds `<row> <k>`, and may die before a batch."""

    def __init__(self, batches: float = float("inf")) -> None:
        self.sampled: list[str] = []
        self._left = batches

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_group: Callable[[Group], None] | None = None
    ) -> list[Group]:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        self.sampled += [prompt.source for prompt in prompts]
        return [Group(prompt, tuple(response(f"{prompt.index} {k}") for k in range(sampling.n))) for prompt in prompts]


def response(text: str) -> Rollout:
    return Rollout.of_response(
        np.array([1, 2]), np.array([False, True]), np.zeros(2, np.float32), text, "stop", version=0
    )


class Rewarder:
    """Scores response k with k, and cannot score those to row 2."""

    def begin(self, group: Group) -> None:
        pass

    def score(self, groups: Sequence[Group], *, out_of: int | None = None, failed: int = 0) -> list[list[Score]]:
        return [[self._score(rollout) for rollout in group.rollouts] for group in groups]

    def _score(self, rollout: Rollout) -> Score:
        row, k = map(int, rollout.text.split())
        return Score(0.0, failure="infrastructure") if row == 2 else Score(float(k))


class Prompts:
    """A source in this process."""

    def __init__(self, config: GenerateConfig) -> None:
        settings = source_settings(config)
        self._source = Source(
            model=settings.model,
            trust_remote_code=False,
            data=settings.data,
            evaluation=settings.evaluation,
            seed=settings.seed,
            requirements=settings.requirements,
        )
        self.evaluation_rows = self._source.evaluation_rows
        self.begin_evaluation_rows = lambda start, count: partial(self._source.evaluation_rows, start, count)
        self.evaluation_fingerprints = self._source.evaluation_fingerprints

    def save_media(self, folder: Path, media: Sequence[Media]) -> None:
        self._source.save_media(folder, media)


class Run:
    """A run of the verb in a folder, in parts."""

    def __init__(self, model: str, out: Path, **flags: Any) -> None:
        common = {
            "actor.model_name_or_path": model,
            "data.prompt_dataset": "visual_math?families=count&pixels=56&size=7",
            "rollout.batch_size": 3,
            "rollout.n_samples_per_prompt": 2,
            "ckpt.output_dir": out,
        }
        words = [word for flag, value in (common | flags).items() for word in (f"--{flag}", str(value))]
        self.config = load(GenerateConfig, words)
        self.folder = RunFolder(out)
        self.output = output_of(self.config, self.folder)
        out.mkdir(exist_ok=True, parents=True)

    def sample(self, engines: Engines) -> Journal:
        journal = Journal(self.folder.responses)
        check_output(self.output, self.folder)
        settings = settings_of(self.config)
        check_same_settings(journal, settings)
        config = self.config
        builder: Any = SimpleNamespace(
            prompts=lambda config, say: Prompts(config),
            evaluation_roles=lambda config, processor, report: (engines, Rewarder()),
            stack=ExitStack(),
        )
        report: Any = SimpleNamespace(
            say=lambda line: None,
            begin=lambda **_: None,
            phase=lambda name: nullcontext(),
            step=lambda step, metrics: None,
        )
        processor: Any = None  # that of the real engines and reward models
        _complete(config, self.folder, journal, settings, processor, builder, report)
        return journal

    def rows(self, journal: Journal) -> list[dict[str, Any]]:
        check_output(self.output, self.folder)
        remember_output(self.output, self.folder)
        _write(self.config, journal, self.output)
        return [json.loads(line) for line in self.output.read_text().splitlines()]


ALL = [f"visual_math:{row}" for row in range(7)]


def test_finished_batches_are_not_sampled_again(model: str, tmp_path: Path) -> None:
    run = Run(model, tmp_path / "out", **{"generate.keep": "best"})
    killed = Engines(batches=2)
    with pytest.raises(KeyboardInterrupt):
        run.sample(killed)
    assert killed.sampled == ALL[:6]
    assert not run.output.exists(), "it appears when it is complete"
    path = run.folder.responses
    path.write_bytes(path.read_bytes()[:-5])  # the second batch is torn
    resumed = Engines()
    rows = run.rows(run.sample(resumed))
    assert resumed.sampled == ALL[3:]
    # Nothing could score the responses to row 2.
    assert [(row["source"], row["answer"]) for row in rows] == [(ALL[i], f"{i} 1") for i in (0, 1, 3, 4, 5, 6)]
    assert all((tmp_path / "out" / row["images"][0]).is_file() for row in rows)
    again = Engines()
    pairs = Run(model, tmp_path / "out", **{"generate.keep": "pairs", "generate.output": tmp_path / "b" / "p.jsonl"})
    rows = pairs.rows(pairs.sample(again))
    assert again.sampled == [], "another choice of rows samples nothing"
    assert [(row["chosen"], row["rejected"]) for row in rows] == [(f"{i} 1", f"{i} 0") for i in (0, 1, 3, 4, 5, 6)]
    assert all((tmp_path / "b" / row["images"][0]).is_file() for row in rows), "images lie beside the rows"


def test_the_rows_are_read_back_with_their_images(model: str, tmp_path: Path) -> None:
    from vlmrl.cluster.data import row_requirements
    from vlmrl.config.stages import SftConfig

    run = Run(model, tmp_path / "out", **{"rollout.n_samples_per_prompt": 1})
    run.rows(run.sample(Engines()))
    words = ["--actor.model_name_or_path", model, "--data.prompt_dataset", str(run.output)]
    config = load(SftConfig, words)
    source = Source(
        model=model,
        trust_remote_code=False,
        data=config.data,
        evaluation=None,
        seed=1,
        requirements=row_requirements(config),
    )
    samples, metrics = source.draw_samples(7)
    assert metrics["data/rows_dropped"] == 0
    original = Prompts(run.config).evaluation_rows(0, 7)
    prompts = {tuple(prompt.tokens) for prompt in original}
    assert {tuple(sample.tokens[~sample.sampled]) for sample in samples} == prompts
    assert {sample.media[0].hash for sample in samples} == {prompt.media[0].hash for prompt in original}
    read = {source.processor.decode(sample.tokens[sample.sampled]) for sample in samples}
    assert {text[:3] for text in read} == {f"{row} 0" for row in range(7)}


def test_other_settings_are_refused_with_what_differs(model: str, tmp_path: Path) -> None:
    run = Run(model, tmp_path / "out")
    run.sample(Engines())
    for flag, value, message in [
        ("rollout.temperature", 0.5, "rollout.temperature 1.0, now 0.5"),
        ("rollout.n_samples_per_prompt", 3, "rollout.n_samples_per_prompt 2, now 3"),
        ("train.seed", 1, "train.seed 42, now 1"),
        ("reward.functions", "exact", "reward.functions {}, now {'exact': 1.0}"),
        ("data.system_prompt", "Be brief.", "data.system_prompt None, now 'Be brief.'"),
    ]:
        with pytest.raises(ConfigError) as error:
            Run(model, tmp_path / "out", **{flag: value}).sample(Engines())
        assert message in str(error.value), flag
    other = Engines()
    Run(model, tmp_path / "out", **{"rollout.batch_size": 2, "vllm.num_engines": 2}).sample(other)
    assert other.sampled == []


def test_other_weights_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    model = tiny.build("qwen2_5_vl", tmp_path / "model", size="micro")
    run = Run(str(model), tmp_path / "out")
    run.sample(Engines())
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\1\1\1")
    with pytest.raises(ConfigError, match=r"files of actor.model_name_or_path \(different content\)"):
        run.sample(Engines())


def test_another_reward_model_in_the_same_folder_is_refused(model: str, tmp_path: Path) -> None:
    scorer = tiny.build("qwen2_5_vl", tmp_path / "scorer", size="micro")
    flags = {"reward.model_name_or_path": scorer}
    run = Run(model, tmp_path / "out", **flags)
    run.sample(Engines())
    again = Engines()
    others = {"reward.offload": "true", "train.max_tokens_per_gpu": 64}
    Run(model, tmp_path / "out", **flags, **others).sample(again)
    assert again.sampled == []
    with pytest.raises(ConfigError, match=r"reward\.model_weight 1\.0, now 2\.0"):
        Run(model, tmp_path / "out", **flags, **{"reward.model_weight": 2}).sample(Engines())
    weights = next(scorer.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\1\1\1")
    changed = r"files of reward\.model_name_or_path \(different content\): give the same, or choose another --ckpt"
    with pytest.raises(ConfigError, match=changed):
        run.sample(Engines())


def test_other_rows_in_the_same_file_are_refused(model: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"input": "a"}\n{"input": "b"}\n')
    run = Run(model, tmp_path / "out", **{"data.prompt_dataset": file})
    run.sample(Engines())
    file.write_text('{"input": "a"}\n{"input": "c"}\n')
    with pytest.raises(DataError, match=r"holds responses to other data .*questions\.jsonl has different content"):
        run.sample(Engines())


def test_rows_that_cannot_be_used_are_left_out_of_their_batch(model: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"input": "a"}\n{"input": ""}\n{"input": "c"}\n')
    flags = {"data.prompt_dataset": file, "data.max_dropped_fraction": 0.5, "rollout.batch_size": 1}
    run = Run(model, tmp_path / "out", **flags)
    engines = Engines()
    rows = run.rows(run.sample(engines))
    assert engines.sampled == ["questions:0", "questions:2"]
    assert len(rows) == 4
    assert "images" not in rows[0]


def test_responses_without_a_score_are_named_at_the_end(model: str, tmp_path: Path) -> None:
    run = Run(model, tmp_path / "out", **{"generate.keep": "best"})
    journal = run.sample(Engines())
    metrics = _write(run.config, journal, run.output)
    assert metrics["generate/failed"] == 2, "those to row 2"
    line = _failures(2, journal)
    assert line.startswith(
        "2 responses could not be scored (generate/failed), the first: infrastructure; they are only"
    )
    assert str(journal.path) in line


def test_no_rows_are_an_error(model: str, tmp_path: Path) -> None:
    flags = {"generate.keep": "pairs", "data.max_samples": 3}
    run = Run(model, tmp_path / "out", **flags)
    journal = run.sample(Engines())
    journal.path.write_text(journal.path.read_text().replace('"score": 1.0', '"score": 0.0'))
    with pytest.raises(DataError, match=r"generate\.keep pairs makes no row of 6 responses, of which 4 have a score"):
        run.rows(Journal(journal.path))


def test_files_of_others_are_not_replaced(model: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text("{}\n")
    with pytest.raises(ConfigError, match="exists, and was not written by this run: choose another"):
        Run(model, tmp_path / "out", **{"generate.output": mine}).sample(Engines())
    run = Run(model, tmp_path / "done")
    run.rows(run.sample(Engines()))
    again = Run(model, tmp_path / "done", **{"generate.output": mine})
    with pytest.raises(ConfigError, match="exists, and was not written by this run"):
        again.sample(Engines())
    assert mine.read_text() == "{}\n", "the rows that another run left, or those that were responded to"
    assert run.rows(run.sample(Engines())), "its own file may be written again"
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match="is a folder: choose another"):
        Run(model, tmp_path / "out", **{"generate.output": tmp_path / "folder.jsonl"}).sample(Engines())
    with pytest.raises(ConfigError, match=r"mine\.jsonl cannot be written: choose another folder"):
        Run(model, tmp_path / "out", **{"generate.output": mine / "rows.jsonl"}).sample(Engines())


def test_a_dry_run_prints_the_plan(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--actor.model_name_or_path", model, "--ckpt.output_dir", str(tmp_path / "out"), "--dry-run"]
    assert cli.main(["generate", *words, "--data.prompt_dataset", "visual_math?size=5&pixels=56"]) == 0
    shown = capsys.readouterr().out
    assert "dry run: nothing was started and nothing written" in shown
    assert not (tmp_path / "out").exists()


GUIDE = Path(__file__).parents[3] / "datasets" / "README.md"


def test_the_three_commands_of_the_guide_load() -> None:
    section = GUIDE.read_text().partition("## Responses of a model as rows\n")[2]
    commands = section.partition("```sh\n")[2].partition("```")[0].splitlines()
    assert [shlex.split(command)[1] for command in commands] == ["generate", "sft", "eval"]
    kinds = {kind.verb: kind for kind in VERBS}
    for command in commands:
        _, verb, *words = shlex.split(command)
        load(kinds[verb], words)


def test_an_empty_dataset(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    words = ["--actor.model_name_or_path", model, "--ckpt.output_dir", str(tmp_path / "out"), "--dry-run"]
    assert cli.main(["generate", *words, "--data.prompt_dataset", str(tmp_path / "empty.jsonl")]) == 2
    assert "empty.jsonl is empty" in capsys.readouterr().err
