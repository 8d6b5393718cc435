from pathlib import Path

import pytest

from vlmrl.config.load import load
from vlmrl.config.openrlhf import REFUSED, REFUSED_VALUES
from vlmrl.config.run import RlConfig
from vlmrl.errors import ConfigError

FLAGS = Path(__file__).with_name("openrlhf_flags.txt").read_text().split()


def test_there_are_164() -> None:
    assert len(FLAGS) == len(set(FLAGS)) == 164


@pytest.mark.parametrize("flag", FLAGS)
def test_each_is_carried_or_refused_with_a_sentence(flag: str) -> None:
    is_carried = flag in RlConfig.settings()
    assert is_carried != (flag in REFUSED)
    if is_carried:
        return
    reason = REFUSED[flag]
    assert reason.startswith(("not built yet: ", "replaced by ", "never: "))
    with pytest.raises(ConfigError) as caught:
        load(RlConfig, ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", f"--{flag}", "1"])
    assert str(caught.value) == f"--{flag}: {reason}"


def test_nothing_else_is_refused() -> None:
    assert set(REFUSED) <= set(FLAGS)


@pytest.mark.parametrize(("setting", "value"), [(s, v) for s, values in REFUSED_VALUES.items() for v in values])
def test_a_value_of_openrlhf_that_we_lack_is_refused_with_a_sentence(setting: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RlConfig, ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", f"--{setting}", value])
    assert str(caught.value) == f"--{setting} {value}: {REFUSED_VALUES[setting][value]}"


def test_its_default_way_of_publishing_weights_is_carried_and_is_not_ours() -> None:
    needed = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]
    assert load(RlConfig, [*needed, "--vllm.sync_backend", "nccl"]).vllm.sync_backend == "nccl"
    assert load(RlConfig, needed).vllm.sync_backend == "shm"


def test_a_refused_section_of_a_file_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "ppo.yaml"
    file.write_text("actor: {model_name_or_path: m}\ndata: {prompt_dataset: d}\ncritic:\n  adam:\n    lr: 1.0e-5\n")
    with pytest.raises(ConfigError) as caught:
        load(RlConfig, ["--config", str(file)])
    assert str(caught.value) == f"{file}:3: critic: {REFUSED['critic.adam.lr']}"
