"""Settings of supervised fine-tuning that need or exclude each other."""

import pytest

from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.errors import ConfigError

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]


def mistake(words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(SftConfig, [*NEEDED, *words.split()])
    return str(caught.value)


def test_texts_have_no_questions() -> None:
    assert load(SftConfig, [*NEEDED, "--sft.pretrain_mode", "true"]).sft.pretrain_mode
    for setting in ("data.output_key a", "data.multiturn true", "data.system_prompt a", "data.label_key a"):
        name = setting.partition(" ")[0]
        assert f"{name} would not be read: sft.pretrain_mode learns texts" in mistake(
            f"--sft.pretrain_mode true --{setting}"
        )


def test_conversations_need_a_chat_template() -> None:
    assert "data.multiturn learns responses in conversations" in mistake(
        "--data.multiturn true --data.apply_chat_template false"
    )


@pytest.mark.parametrize(
    "setting",
    [
        *("eval.temperature 1", "reward.functions exact", "vllm.num_engines 2", "rollout.max_new_tokens 9"),
        "train.colocate_all true",
    ],
)
def test_settings_of_sampling_are_read_only_where_responses_are_sampled(setting: str) -> None:
    name = setting.partition(" ")[0]
    words = f"--eval.dataset e --{setting}"
    assert f"{name} would not be read: eval.generate_enable is off" in mistake(words)
    config = load(SftConfig, [*NEEDED, *words.split(), "--eval.generate_enable", "true"])
    assert config.generation is not None


def test_sampling_has_the_runs_settings() -> None:
    words = "--eval.dataset e --eval.generate_enable true --eval.n_samples_per_prompt 4 --train.seed 3"
    generation = load(SftConfig, [*NEEDED, *words.split()]).generation
    assert generation is not None
    assert (generation.eval.n_samples_per_prompt, generation.train.seed) == (4, 3)
    assert generation.max_sequence_tokens == generation.data.max_len + generation.rollout.max_new_tokens
    assert not generation.has_agent


def test_engines_may_share_the_devices_of_the_model() -> None:
    sampled = "--eval.dataset e --eval.generate_enable true"
    config = load(SftConfig, [*NEEDED, *sampled.split(), "--train.colocate_all", "--vllm.enable_sleep"])
    assert config.pools == [{"actor", "vllm"}]
    assert load(SftConfig, [*NEEDED, *sampled.split()]).pools == []
    assert "vllm.enable_sleep frees memory for models on the same GPUs: it needs train.colocate_all" in mistake(
        f"{sampled} --vllm.enable_sleep"
    )
    assert "vllm.sync_backend nccl cannot connect" in mistake(
        f"{sampled} --vllm.sync_backend nccl --train.colocate_all"
    )


def test_sampling_needs_questions_noise_and_a_reward() -> None:
    sampled = "--eval.dataset e --eval.generate_enable true"
    assert "texts have no questions (sft.pretrain_mode)" in mistake(f"{sampled} --sft.pretrain_mode true")
    assert "eval.temperature 0 gives the same response 2 times" in mistake(
        f"{sampled} --eval.temperature 0 --eval.n_samples_per_prompt 2"
    )
    assert "there is no reward" in mistake(f"{sampled} --reward.functions {{}}")
    assert "nothing is evaluated without eval.dataset" in mistake("--eval.generate_enable true")
