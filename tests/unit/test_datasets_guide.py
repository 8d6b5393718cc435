"""The snippets of datasets/README.md run, and all names in the tables for users of TRL and OpenRLHF exist."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from vlmrl.cluster.data import row_requirements
from vlmrl.commands.preflight import check_columns
from vlmrl.config.data import Columns
from vlmrl.config.load import load
from vlmrl.config.openrlhf import REFUSED
from vlmrl.config.stages import SftConfig
from vlmrl.config.training import TrainingConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verb_list import VERBS
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.data.source import Source
from vlmrl.models import tiny
from vlmrl.plugins import processor
from vlmrl.rewards.function_worker import declare
from vlmrl.system.user_function import load_function

GUIDE = Path(__file__).parents[2] / "datasets" / "README.md"
FROM_OTHERS = Path(__file__).parents[2] / "examples"
_BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_OF_THE_TRAINER = {"reward_funcs"}


class Block(NamedTuple):
    language: str
    file: str
    text: str


BLOCKS = [Block(*result) for result in _BLOCK.findall(GUIDE.read_text())]
COMMANDS = [line for block in BLOCKS if block.language == "bash" for line in block.text.splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "micro", size="micro"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the guide, with all images that they name."""
    root = tmp_path_factory.mktemp("guide")
    for block in BLOCKS:
        if block.file:
            (root / block.file).parent.mkdir(exist_ok=True)
            (root / block.file).write_text(block.text)
    for where in (root, root / "pictures", root / "flowers" / "rose", root / "flowers" / "lily"):
        where.mkdir(parents=True, exist_ok=True)
        for name in sorted(set(re.findall(r"\w+\.png", "".join(block.text for block in BLOCKS)))):
            Image.new("RGB", (56, 56), "red").save(where / name)
    return root


def settings(command: str, model: str) -> VerbConfig:
    program, verb, *words = shlex.split(command)
    assert program == "vlmrl"
    (kind,) = [kind for kind in VERBS if kind.verb == verb]
    return load(kind, [*words, "--actor.model_name_or_path", model])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_every_row(command: str, model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = settings(command, model)
    assert isinstance(config, TrainingConfig | EvalConfig)
    check_columns(config)
    source = Source(
        model=model,
        trust_remote_code=False,
        data=config.data,
        evaluation=getattr(config, "eval", None),
        seed=config.train.seed,
        requirements=row_requirements(config),
    )
    prompts, metrics = source.draw(2 * source.num_rows())
    assert metrics["data/rows_dropped"] == 0, source.take_warnings()
    held = sum(map(len, source.evaluation().values()))
    assert (held > 0) == ("eval_fraction" in command or "mine.yaml" in command)
    images = sum(len(prompt.media) for prompt in prompts)
    is_of_text = any(word in command for word in ("sft", "dpo", "steps.jsonl", "verl")) and not re.search(
        "llava|turns|texts", command
    )
    assert (images > 0) == (not is_of_text)
    if isinstance(config, RlConfig) and config.reward.user_function is not None:
        spec = config.reward.user_function
        declared = declare(load_function(spec, "reward.remote_url"), spec)
        assert (declared.batch is not None) == ("batched.py" in command)


def test_every_file_is_used_by_a_command() -> None:
    unused = [
        block.file
        for block in BLOCKS
        if block.file and not any(Path(block.file).parts[0] in command for command in COMMANDS)
    ]
    assert not unused


def test_all_formats_of_a_response_give_the_same_tokens(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    reader, taught = processor(model, min_pixels=3136, max_pixels=12544), set()
    for file in ("sft.jsonl", "messages.jsonl", "completion.jsonl"):
        config = settings(f"vlmrl sft --data.prompt_dataset {file}", model)
        assert isinstance(config, SftConfig)
        source = Source(
            model=model,
            trust_remote_code=False,
            data=config.data,
            evaluation=None,
            seed=1,
            requirements=row_requirements(config),
        )
        (sample,), _ = source.draw_samples(1)
        taught.add((reader.decode(sample.tokens[~sample.sampled]), reader.decode(sample.tokens[sample.sampled])))
    assert taught == {("user\nWhat is 2 + 2?\nassistant\n", "Four.")}


def load_reward(folder: Path, name: str) -> Callable[..., Any]:
    return load_function(f"{folder}/{name}", "reward.remote_url")


def test_the_example_rewards_give_the_documented_scores(folder: Path) -> None:
    assert load_reward(folder, "rewards.py:close_counts")(response="I see 5, no: 4", label="3") == 0.5
    assert load_reward(folder, "rewards.py:close_counts")(response="none", label="3") == 0.0
    choice = load_reward(folder, "rewards.py:one_of_the_choices")
    assert [choice(response=text, label="B") for text in ("B", "(A) or B.", "B, or A", "Both", "")] == [1, 1, 0, 0, 0]
    score = load_reward(folder, "rewards.py:valid_json")
    wanted = {"keys": ["a"]}
    assert [score(response=text, metadata=wanted) for text in ('{"a": 1}', '{"b": 1}', "[1]", "{")] == [1, 0.5, 0.5, 0]
    assert load_reward(folder, "rewards.py:brief")(response="x" * 100) == pytest.approx(0.8)


def test_the_batched_rewards_have_the_signatures_of_their_trainers(folder: Path) -> None:
    trl = load_reward(folder, "batched.py:for_trl")
    chat = [[{"role": "assistant", "content": "It is 4."}]]
    assert trl(completions=["It is 4.", "5"], answer=["4", "4"], prompts=["q", "q"]) == [1.0, 0.0]
    assert trl(completions=chat, answer=["4"]) == [1.0]
    openrlhf = load_reward(folder, "batched.py:reward_func")
    result = openrlhf(queries=["4? 4", "4? 5"], prompts=["4?", "4?"], labels=["4", "4"])
    assert result == {"rewards": [1.0, 0.0], "scores": [1.0, 0.0], "extra_logs": {"right": 0.5}}


def rows_of_table(library: str) -> list[tuple[list[str], list[str]]]:
    """The names in the first two columns of the table of settings in the guide for users of a library."""
    guide = (FROM_OTHERS / f"from_{library}" / "README.md").read_text()
    section = guide.partition("## Settings\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [
        (re.findall(r"`([^`]+)`", line.split("|")[1]), re.findall(r"`([^`]+)`", line.split("|")[2])) for line in lines
    ]


@pytest.mark.parametrize("library", ["trl", "openrlhf"])
def test_settings_in_the_tables_exist(library: str) -> None:
    known = {name for verb in VERBS for name in verb.settings()}
    table = rows_of_table(library)
    assert len(table) > 15
    assert not [name for _, ours in table for name in ours if name not in known]


def test_the_names_of_trl_exist() -> None:
    trl = pytest.importorskip("trl")
    known = {field.name for kind in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments) for field in fields(kind)}
    theirs = [name for names, _ in rows_of_table("trl") for name in names]
    assert not [name for name in theirs if name not in known | _OF_THE_TRAINER]
    assert len(theirs) == len(set(theirs))


def test_the_openrlhf_table_is_complete_and_its_names_exist() -> None:
    listed = (Path(__file__).parent / "config" / "openrlhf_flags.txt").read_text().split()
    theirs = [name for names, _ in rows_of_table("openrlhf") for name in names]
    assert not [name for name in theirs if name not in listed]
    assert {name for name, reason in REFUSED.items() if reason.startswith("replaced by")} <= set(theirs)


def test_the_guide_has_the_default_columns() -> None:
    section = GUIDE.read_text().partition("## Rows\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| `data\.(\w+)` \| `(\w+)` \|", section, re.MULTILINE)
    assert dict(table) == {name: Columns.model_fields[name].default for name, _ in table}
    assert len(table) == 4


def test_csv_snippets_of_the_guide_are_tables() -> None:
    for block in BLOCKS:
        if block.language == "csv":
            assert len({len(line) for line in csv.reader(block.text.splitlines())}) == 1
