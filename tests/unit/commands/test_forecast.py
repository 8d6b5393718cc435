"""The description of a run before it starts: steps, trained parts, memory, rows and rewards."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vlmrl.commands import forecast
from vlmrl.commands.memory import GIB, Machine
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError, RewardError
from vlmrl.models import tiny
from vlmrl.plugins import Processor, processor
from vlmrl.types import Prompt, Sample


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "micro", size="micro"))


@pytest.fixture(scope="module")
def tools(model: str) -> Processor:
    return processor(model, min_pixels=3136, max_pixels=12544)


def rl(line: str = "", *, model: str = "m") -> RlConfig:
    return load(RlConfig, ["--actor.model_name_or_path", model, "--data.prompt_dataset", "d", *line.split()])


def sft(line: str = "") -> SftConfig:
    return load(SftConfig, ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", *line.split()])


def prompt(label: str | None = "4", *, length: int = 3) -> Prompt:
    tokens = np.arange(length)
    return Prompt(index=0, source="toy:7", text="2 + 2?", tokens=tokens, request=tokens, label=label)


STEP = "--rollout.batch_size 16 --rollout.n_samples_per_prompt 4"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # 200 rows twice are 400 prompts, 25 batches of 16; 64 samples are two optimizer steps of 32.
        (
            "--train.batch_size 32 --train.num_episodes 2",
            "plan: 25 steps of 16 prompts x 4 responses = 64 samples, 2 updates each of 32 samples; 2 passes over 200",
        ),
        (
            "--train.batch_size 64 --train.max_steps 3",
            "plan: 3 steps of .* 1 update each .* over 200 rows, cut at",
        ),
        ("--train.batch_size 64 --train.max_epochs 3", "plan: 12 steps of .* 3 updates each of 64 samples"),
        (
            "--train.batch_size 64 --train.async_enable --algo.advantage.is_correction_enable",
            "plan: 12 steps of .* over 200 rows; engines sample up to 1 step ahead$",
        ),
        (
            "--train.batch_size 64 --train.async_queue_size 0 --train.async_enable",
            "plan: 12 steps of .* over 200 rows$",
        ),
        ("--train.batch_size 64 --algo.dynamic_filtering_enable", "plan: at most 12 steps of "),
        (
            "--train.batch_size 32 --algo.advantage.estimator gae --critic.freezing_steps 2",
            "plan: 12 steps of .* 2 updates each of 32 samples",
        ),
    ],
)
def test_steps_samples_and_updates_are_counted(line: str, message: str) -> None:
    assert re.match(message, forecast.format_steps(rl(f"{STEP} {line}"), 200))


def test_supervised_steps_are_counted() -> None:
    message = forecast.format_steps(sft("--train.batch_size 32 --train.max_epochs 2"), 100)
    assert message == "plan: 6 steps of 32 samples; 2 passes over 100 rows"


def test_rows_that_do_not_fill_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"200 rows, 1 times over, do not fill one batch of 256: lower --rollout"):
        forecast.format_steps(rl("--rollout.batch_size 256"), 200)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "trains: language model and vision tower and projector"),
        ("--actor.freeze_visual_encoder", "trains: language model and projector; frozen: vision tower"),
        (
            "--ds.lora.rank 8",
            "trains: adapters of rank 8 in language model; frozen: vision tower and projector",
        ),
        (
            "--ds.lora.rank 4 --ds.lora.target_modules all --actor.freeze_projector",
            "trains: adapters of rank 4 in language model and vision tower; frozen: projector",
        ),
    ],
)
def test_the_parts_that_train_are_named(line: str, message: str, model: str, tools: Processor) -> None:
    assert forecast.format_trained_parts(rl(line, model=model), tools) == message


def test_memory_is_shown_and_too_little_is_a_warning(model: str) -> None:
    config = rl("--rollout.batch_size 4 --train.batch_size 32", model=model)
    (line,) = forecast.format_memory(config, Machine("cpu", 64 * GIB, 64 * GIB))
    assert re.match(r"memory .*: main memory about \d+\.\d of 64\.0 GiB$", line)
    _, warning = forecast.format_memory(config, Machine("cpu", 0.5 * GIB, 0.5 * GIB))
    assert warning.startswith("warning: memory: main memory: ")


def test_dropped_rows_are_counted_by_reason() -> None:
    prompts = [prompt(length=3), prompt(length=40)]
    assert forecast.format_rows(9, {}, prompts, max_len=64) == (
        "rows: of the first 2, none is dropped; the longest prompt has 40 tokens, data.max_len is 64"
    )
    message = forecast.format_rows(9, {"too long": 2, "no question": 1}, prompts, max_len=64)
    assert message.startswith("rows: of the first 5, 3 are dropped (2 too long, 1 no question); ")


def test_rows_beyond_the_models_positions_are_a_warning(tools: Processor) -> None:
    samples = [Sample(tokens=np.arange(n), sampled=np.arange(n) > 1) for n in (5, 9)]
    assert forecast.format_samples(samples, 9, tools)[0] == "the longest of 2 rows with its response has 9 tokens"
    assert len(forecast.format_samples(samples, 9, tools)) == 2
    assert forecast.format_samples(samples, 8, tools)[2] == (
        "warning: the model has 8 positions, and the longest row 9 tokens"
    )


def test_what_is_learned_of_the_first_row_is_shown(tools: Processor) -> None:
    question, *responses = (tools.tokenizer(text).input_ids for text in ("Name one!", "red", "green" * 200))
    samples = [
        Sample(tokens=np.array([*question, *ids]), sampled=np.arange(len(question) + len(ids)) >= len(question))
        for ids in responses
    ]
    line = forecast.format_samples([*samples, replace(samples[0], group=1)], None, tools)[1]
    assert re.fullmatch(r"learned of the first row: 'red' \| 'greengreen.* \.\.\. .*green'", line)
    assert len(line) < 500


def test_each_reward_source_scores_one_example(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def length(response):\n    return len(response)\n")
    config = rl(f"--reward.functions math format --reward.remote_url {tmp_path}/mine.py:length")
    (line,) = forecast.format_rewards(config, prompt())
    # The box has nine characters: \\boxed{4}.
    assert line == (
        "rewards on toy:7: '\\\\boxed{4}' -> math 1, format 1, length 9, total 11; "
        "an empty response -> math 0, format 0, length 0, total 0"
    )


def test_reward_sources_that_a_dry_run_skips_are_named() -> None:
    config = rl("--reward.remote_url http://127.0.0.1:1 --reward.model_name_or_path r")
    assert forecast.format_rewards(config, prompt()) == [
        "rewards: a dry run does not contact reward servers",
        "rewards: a dry run does not run reward models",
    ]


def test_a_function_that_fails_at_every_response_is_a_warning_and_a_missing_label_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def bad(response):\n    raise KeyError('gold')\n")
    (line,) = forecast.format_rewards(rl(f"--reward.remote_url {tmp_path}/mine.py:bad"), prompt())
    assert line.startswith("warning: rewards on toy:7: bad of reward.remote_url scored none")
    assert "gold" in line
    with pytest.raises(RewardError, match="toy:7 has no label, and the reward function math compares with one"):
        forecast.format_rewards(rl(), prompt(label=None))
