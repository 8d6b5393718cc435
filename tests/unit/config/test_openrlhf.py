from pathlib import Path

import pytest

from vlmrl.config.load import load
from vlmrl.config.openrlhf import REFUSED, REFUSED_VALUES
from vlmrl.config.refused import REFUSED_VALUES as OTHER_VALUES
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError

FLAGS = Path(__file__).with_name("openrlhf_flags.txt").read_text().split()


def test_there_are_164_flags() -> None:
    assert len(FLAGS) == len(set(FLAGS)) == 164


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_is_supported_or_refused_with_a_reason(flag: str) -> None:
    is_carried = flag in RlConfig.settings()
    assert is_carried != (flag in REFUSED)
    if is_carried:
        return
    reason = REFUSED[flag]
    assert reason.startswith(("not built yet: ", "replaced by ", "never: "))
    with pytest.raises(ConfigError) as caught:
        load(RlConfig, ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", f"--{flag}", "1"])
    assert str(caught.value) == f"--{flag}: {reason}"


def test_no_other_label_is_refused() -> None:
    assert set(REFUSED) <= set(FLAGS)


@pytest.mark.parametrize(("setting", "value"), [(s, v) for s, values in REFUSED_VALUES.items() for v in values])
def test_an_unsupported_value_of_openrlhf_is_refused_with_a_reason(setting: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RlConfig, ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", f"--{setting}", value])
    assert str(caught.value) == f"--{setting} {value}: {REFUSED_VALUES[setting][value]}"


@pytest.mark.parametrize(("setting", "value"), [(s, v) for s, values in OTHER_VALUES.items() for v in values])
def test_other_values_that_users_may_expect_are_refused_with_a_reason(setting: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RlConfig, ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", f"--{setting}", value])
    assert str(caught.value) == f"--{setting} {value}: {OTHER_VALUES[setting][value]}"


def test_its_default_sync_backend_is_supported_but_not_our_default() -> None:
    needed = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]
    assert load(RlConfig, [*needed, "--vllm.sync_backend", "nccl"]).vllm.sync_backend == "nccl"
    assert load(RlConfig, needed).vllm.sync_backend == "shm"


def test_critic_flags_are_supported() -> None:
    needed = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--algo.advantage.estimator", "gae"]
    critic = load(RlConfig, [*needed, "--critic.adam.lr", "1e-5", "--critic.freezing_steps", "10"]).critic
    assert (critic.adam.lr, critic.adam.betas, critic.freezing_steps) == (1e-5, (0.9, 0.95), 10)
    assert load(RlConfig, needed).critic.adam.lr == 9e-6
