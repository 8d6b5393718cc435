"""Settings from YAML files and flags, and lines of errors."""

import re
from pathlib import Path

import pytest

from vlmrl.config.bench_verbs import RolloutBench, SyncBench
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import ConfigError

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]


def rl(*flags: str) -> RlConfig:
    return load(RlConfig, [*NEEDED, *flags])


def mistakes(*flags: str, needed: bool = True, kind: type = RlConfig) -> list[str]:
    """The lines that a user sees."""
    with pytest.raises(ConfigError) as caught:
        load(kind, [*(NEEDED if needed else []), *flags])
    first, *rest = str(caught.value).splitlines()
    if not rest:
        return [first]
    assert first == f"{len(rest)} mistakes in the settings"
    return [line.strip() for line in rest]


def write(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


# --- accepted --------------------------------------------------------------------------------------------------------


def test_flags_of_every_kind_are_read() -> None:
    config = rl(
        *["--train.colocate_all", "--data.apply_chat_template", "false", "--actor.adam.betas", "0.8", "0.9"],
        *["--actor.eps_clip_low_high", "(0.2, 0.28)", "--reward.functions", '{"exact": 1, "format": 0.5}'],
        *["--ds.zero_stage", "3", "--actor.adam.lr=1e-5", "--ckpt.save_steps", "-1", "--eval.dataset", "none"],
        *["--reward.clip_range", "-1", "1", "--train.seed", "-7", "--data.system_prompt", "two words"],
    )
    assert config.train.colocate_all is True
    assert config.data.apply_chat_template is False
    assert config.actor.adam.betas == (0.8, 0.9)
    assert config.actor.eps_clip_low_high == (0.2, 0.28)
    assert config.reward.functions == {"exact": 1.0, "format": 0.5}
    assert config.ds.zero_stage == 3
    assert config.actor.adam.lr == 1e-5
    assert config.ckpt.save_steps == -1
    assert config.eval.dataset is None
    assert config.reward.clip_range == (-1.0, 1.0)
    assert config.train.seed == -7
    assert config.data.system_prompt == "two words"


@pytest.mark.parametrize("words", [["0.25", "0.75"], ["0.25,0.75"], ["[0.25, 0.75]"]])
def test_several_values_are_words_or_a_list(words: list[str]) -> None:
    assert rl("--data.prompt_dataset", "a,b", "--data.prompt_probs", *words).data.prompt_probs == (0.25, 0.75)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("1", True), ("off", False), ("no", False)]
)
def test_a_switch_takes_an_explicit_value(text: str, value: bool) -> None:
    assert rl("--train.colocate_all", text).train.colocate_all is value


def test_the_last_of_two_equal_flags_wins() -> None:
    assert rl("--train.seed", "1", "--train.seed", "2").train.seed == 2


def test_files_come_in_order_and_flags_last(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "train: {seed: 1, max_steps: 10}\nactor:\n  adam: {lr: 1e-4}\n")
    second = write(tmp_path / "b.yaml", "train:\n  seed: 2\nactor: {adam: {weight_decay: 0.1}}\n")
    config = rl("--train.timeout_s", "9", "--config", first, f"--config={second}", "--actor.adam.weight_decay", "0.2")
    assert (config.train.seed, config.train.max_steps, config.train.timeout_s) == (2, 10, 9)
    assert (config.actor.adam.lr, config.actor.adam.weight_decay) == (1e-4, 0.2)


def test_a_later_dict_replaces_an_earlier_one_completely(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "reward: {functions: {math: 1, format: 0.1}}\n")
    assert rl("--config", file, "--reward.functions", "{exact: 1}").reward.functions == {"exact": 1.0}


def test_a_file_may_use_full_names_empty_sections_and_anchors(tmp_path: Path) -> None:
    dotted = write(tmp_path / "a.yaml", "train.seed: 5\nactor.adam: {lr: 0.5}\nrollout:\n")
    empty = write(tmp_path / "b.yaml", "# nothing yet\n")
    anchors = write(tmp_path / "c.yaml", "eval: &e {dataset: x, max_samples: 3}\ndata:\n  <<: {max_samples: 4}\n")
    config = rl("--config", dotted, "--config", empty, "--config", anchors)
    assert (config.train.seed, config.actor.adam.lr, config.eval.max_samples, config.data.max_samples) == (5, 0.5, 3, 4)


# --- refused ---------------------------------------------------------------------------------------------------------


def test_missing_settings_are_named_with_their_flags() -> None:
    model, data = mistakes(needed=False)
    assert model == "--actor.model_name_or_path is missing: Local folder or Hub id of the model."
    assert data.startswith("--data.prompt_dataset is missing: Dataset: a name in")


def test_a_misspelt_flag_gets_the_nearest_name() -> None:
    assert mistakes("--train.bach_size", "4") == [
        "--train.bach_size: no such setting; did you mean --train.batch_size?"
    ]
    assert mistakes("--zzz") == ["--zzz: no such setting, and none like it; `vlmrl rl --help` lists them"]


def test_a_misspelt_required_flag_is_not_also_reported_missing() -> None:
    lines = mistakes("--actor.model_name_or_pth", "m", "--data.prompt_dataset", "d", needed=False)
    assert lines == ["--actor.model_name_or_pth: no such setting; did you mean --actor.model_name_or_path?"]


def test_a_misspelt_key_is_reported_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "train:\n  seed: 1\n\n  bach_size: 4\nrolout:\n  batch_size: 4\n")
    assert mistakes("--config", file) == [
        f"{file}:4: train.bach_size: no such setting; did you mean train.batch_size?",
        f"{file}:5: rolout: no such section; did you mean rollout?",
    ]


def test_a_setting_of_another_verb_names_that_verb() -> None:
    assert mistakes("--rollout.n_samples_per_prompt", "4", kind=SftConfig) == [
        "--rollout.n_samples_per_prompt: vlmrl sft does not have it; vlmrl rl does"
    ]


def test_a_section_is_not_a_setting(tmp_path: Path) -> None:
    assert mistakes("--train", "3") == ["--train: is a section: give its settings, --train.NAME value"]
    file = write(tmp_path / "a.yaml", "train: 3\n")
    assert mistakes("--config", file) == [f"{file}:1: train: is a section: give its settings below it, `name: value`"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--train.batch_size", "many"], "--train.batch_size many: should be a valid integer"),
        (["--train.batch_size", "0"], "--train.batch_size 0: should be greater than 0"),
        (["--train.batch_size", "1.5"], "--train.batch_size 1.5: should be a valid integer"),
        (["--train.batch_size"], "--train.batch_size: needs a value"),
        (["--ds.zero_stage", "4"], "--ds.zero_stage 4: should be 0, 1, 2 or 3"),
        (["--train.colocate_all", "maybe"], "--train.colocate_all maybe: should be a valid boolean"),
        (["--actor.adam.betas", "0.9"], "--actor.adam.betas 0.9: takes 2 values, not 1"),
        (["--actor.adam.lr", "nan"], "--actor.adam.lr nan: should be a finite number"),
        (["--actor.eps_clip_low_high", "0.2"], "--actor.eps_clip_low_high 0.2: takes 2 values, not 1"),
        (["--actor.adam.betas", "0.9", "0.9", "0.9"], "--actor.adam.betas 0.9 0.9 0.9: takes 2 values, not 3"),
        (["--train.seed", "none"], "--train.seed none: needs a value: leave it out for its default, 42"),
        (
            ["--reward.functions", "{math"],
            "--reward.functions {math: should be names, or names and their numbers: '{\"name\": 1}'",
        ),
        (["--train.seed", "1", "2"], "--train.seed 1: takes one value, but '2' follows; quote a value with spaces"),
        (["--eval.steps", "0"], "--eval.steps 0: must be a number of steps above 0, or -1 for never"),
    ],
)
def test_a_wrong_value_is_reported_with_its_flag(flags: list[str], line: str) -> None:
    assert mistakes(*flags) == [line]


def test_a_word_before_all_flags_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^run.yaml: a setting is given as --section.name value$"):
        load(RlConfig, ["run.yaml", *NEEDED])


def test_a_wrong_value_in_a_file_is_reported_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "train:\n  batch_size: many\nds: {zero_stage: 7}\nreward:\n  functions: 3\n")
    assert set(mistakes("--config", file)) == {
        f"{file}:5: reward.functions: 3: should be names, or names and their numbers: '{{\"name\": 1}}'",
        f"{file}:2: train.batch_size: many: should be a valid integer",
        f"{file}:3: ds.zero_stage: 7: should be 0, 1, 2 or 3",
    }


def test_a_conflict_names_the_origin_of_both_settings(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "rollout:\n  batch_size: 10\n  n_samples_per_prompt: 4\n")
    (line,) = mistakes("--config", file, "--train.batch_size", "16")
    assert line.startswith("train.batch_size 16 does not divide the 40 responses of a step")
    assert line.endswith(f" (--train.batch_size, {file}:2, {file}:3)")


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml",
        "actor: {modell: x}\ntrain:\n  micro_batch_size: 0\nalgo:\n  kl: {use_loss: true, init_coef: 0.1}\n",
    )
    lines = mistakes(
        *["--config", file, "--train.dynamic_batch_enable", "--ds.zero_stage", "9", "--vllm.enable_sleep"],
        *["--data.min_pixels", "10", "--data.max_pixels", "5", "--rollout.top_p", "0.5", "--rollout.temperature", "2"],
        *["--rollout.n_samples_per_prompt", "1", "--data.prompt_dataset"],
        needed=False,
    )
    message = [
        f"{file}:1: actor.modell: no such setting; did you mean actor.model_name_or_path?",
        f"{file}:3: train.micro_batch_size: 0: should be greater than 0",
        "--train.dynamic_batch_enable: replaced by train.max_tokens_per_gpu",
        "--ds.zero_stage 9: should be",
        "--data.prompt_dataset: needs a value",
        "algo.kl.estimator k1 has no useful gradient",
        "data.min_pixels 10 is above data.max_pixels 5 (--data.min_pixels, --data.max_pixels)",
        "rollout.top_p 0.5 needs rollout.temperature 1, not 2",
        "rollout.n_samples_per_prompt 1 leaves",
        "vllm.enable_sleep frees memory",
    ]
    assert len(lines) == len(message)
    for start in message:
        assert any(line.startswith(start) for line in lines), start


def test_a_wrong_value_is_not_reported_again_through_its_default() -> None:
    # 12 is not a multiple of the default of 8 responses, which is not the user's mistake.
    flags = ["--rollout.n_samples_per_prompt", "four", "--train.batch_size", "12", "--rollout.batch_size", "12"]
    assert mistakes(*flags) == ["--rollout.n_samples_per_prompt four: should be a valid integer"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {seed: 1\n", ":2: not YAML: "),
        ("- a\n- b\n", ":1: the file must contain sections"),
        ("train:\n  seed: 1\ntrain:\n  seed: 2\n", ":4: train.seed: given twice, first in line 2"),
        ("train:\n  seed: !!python/object:os.system {}\n", ":2: train.seed: could not determine a constructor"),
        ("ckpt:\n  output_dir: 2026-02-30\n", ":2: ckpt.output_dir: day is out of range for month"),
    ],
)
def test_an_invalid_file_is_reported_with_the_line(tmp_path: Path, text: str, line: str) -> None:
    file = write(tmp_path / "a.yaml", text)
    (message,) = mistakes("--config", file)
    assert message.startswith(f"{file}{line}")


def test_an_invalid_date_in_a_flag_is_a_mistake() -> None:
    (message,) = mistakes("--reward.functions", "{math: 2026-02-30}")
    assert message.startswith("--reward.functions {math: 2026-02-30}: should be names")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert mistakes("--config", "no/such.yaml") == ["--config no/such.yaml: cannot be read: No such file or directory"]
    assert mistakes("--config", str(tmp_path)) == [f"--config {tmp_path}: cannot be read: Is a directory"]
    assert mistakes("--config") == ["--config: takes one YAML file, not 0; give it again for another one"]
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\x80\x81\x00train")
    assert mistakes("--config", str(binary))[0].startswith(f"--config {binary}: cannot be read: ")


def test_settings_in_an_unreadable_file_are_not_reported_missing() -> None:
    lines = mistakes("--config", "no/such.yaml", "--train.batch_size", "12", "--train.seed", "x", needed=False)
    assert lines == [
        "--config no/such.yaml: cannot be read: No such file or directory",
        "--train.seed x: should be a valid integer",
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_a_file_may_be_written_by_windows(tmp_path: Path, encoding: str) -> None:
    text = "train: {seed: 7}\ndata: {system_prompt: déjà vu}\n"
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    (tmp_path / "a.yaml").write_bytes((mark + text).encode(encoding))
    config = rl("--config", str(tmp_path / "a.yaml"))
    assert (config.train.seed, config.data.system_prompt) == (7, "déjà vu")


def test_null_is_an_error_for_a_setting_that_needs_a_value(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "train:\n  seed: null\n  max_steps: null\nactor: {optim: ~}\n")
    assert set(mistakes("--config", file)) == {
        f"{file}:2: train.seed: null: needs a value: leave it out for its default, 42",
        f"{file}:4: actor.optim: ~: needs a value: leave it out for its default, adam",
    }


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        (["math"], {"math": 1.0}),
        (["math", "format"], {"math": 1.0, "format": 1.0}),
        (["exact,format"], {"exact": 1.0, "format": 1.0}),
        (["math: 0.5"], {"math": 0.5}),
        (['{"math":', "1,", '"format":', "0.1}"], {"math": 1.0, "format": 0.1}),
    ],
)
def test_names_of_reward_functions_have_weight_one(words: list[str], weights: dict[str, float]) -> None:
    assert rl("--reward.functions", *words).reward.functions == weights


def test_reward_functions_of_a_file_may_be_a_list(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "reward: {functions: [math, format]}\n")
    assert rl("--config", file).reward.functions == {"math": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("prompts", "size", "message"),
    [
        # Of 200 prompts with 8 responses each: 25 groups of 8, or 40.
        ("200", "256", "does not divide the 1600 responses of a step .*: use 200 or 320"),
        ("8", "400", "does not divide the 64 .*: use 64"),
        ("8", "4", "not a multiple of .*_per_prompt 8, and an optimizer step takes whole groups: use 8"),
    ],
)
def test_an_error_about_a_batch_size_names_the_nearest_valid_ones(prompts: str, size: str, message: str) -> None:
    (line,) = mistakes("--rollout.batch_size", prompts, "--train.batch_size", size)
    assert re.search(message, line)


def test_the_other_verbs_load_too() -> None:
    assert load(SftConfig, NEEDED).train.max_epochs == 1
    evaluation = load(EvalConfig, ["--actor.model_name_or_path", "m", "--eval.dataset", "d"])
    assert (evaluation.eval.dataset, evaluation.eval.split) == ("d", "test")
    assert mistakes("--actor.model_name_or_path", "m", needed=False, kind=EvalConfig)[0].startswith("--eval.dataset is")
    assert load(SyncBench, ["--actor.model_name_or_path", "m", "--bench.repeats", "2"]).bench.repeats == 2
    widths = load(RolloutBench, [*NEEDED, "--bench.n_samples_per_prompt", "1", "2", "4"]).bench.n_samples_per_prompt
    assert widths == (1, 2, 4)
