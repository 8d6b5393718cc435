"""Errors about reward sources and the reward server, as a user sees them."""

from pathlib import Path
from typing import Any

import pytest

from vlmrl.config.dump import dump_yaml
from vlmrl.config.load import load
from vlmrl.config.reward import Reward
from vlmrl.config.serving import ServeConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import ConfigError

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]
SCORER = "--reward.model_name_or_path scorer"
ONE, TWO = "http://127.0.0.1:5000", "https://b.example/score"


def rl(line: str = "") -> RlConfig:
    return load(RlConfig, [*NEEDED, *line.split()])


def served(line: str) -> ServeConfig:
    return load(ServeConfig, line.split())


@pytest.mark.parametrize(
    ("line", "function", "servers"),
    [
        ("", None, ()),
        ("--reward.remote_url a/b.py:f", "a/b.py:f", ()),
        (f"--reward.remote_url {ONE}", None, (ONE,)),
        (f"--reward.remote_url {ONE} {TWO}", None, (ONE, TWO)),
        (f"--reward.remote_url {ONE},{TWO}", None, (ONE, TWO)),
        ("--reward.remote_url none", None, ()),
    ],
)
def test_remote_url_is_a_function_or_servers(line: str, function: str | None, servers: tuple[str, ...]) -> None:
    reward = rl(line).reward
    assert (reward.user_function, reward.servers) == (function, servers)


def test_servers_may_be_a_list_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"reward:\n  remote_url: [{ONE}, '{TWO}']\n  remote_images: data\n")
    config = rl(f"--config {file}")
    assert config.reward.servers == (ONE, TWO)
    dump_yaml(config, tmp_path / "config.yaml")
    assert load(RlConfig, ["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    "url", ["", "a.py:", "a.py:f,b.py:g", f"{ONE},a.py:f", "ftp://host/score", "host:5000", "a.py:f b.py:g"]
)
def test_other_values_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"one path/to/file\.py:function, or one or several URLs of servers"):
        load(RlConfig, [*NEEDED, "--reward.remote_url", *(url.split() or [""])])


@pytest.mark.parametrize(
    ("given", "functions"),
    [
        ({}, {"math": 1.0}),
        ({"remote_url": ONE}, {}),
        ({"model_name_or_path": "scorer"}, {}),
        ({"process_model_name_or_path": "scorer"}, {}),
        ({"model_name_or_path": "scorer", "functions": {"exact": 0.5}}, {"exact": 0.5}),
    ],
)
def test_another_source_replaces_the_default_functions(given: dict[str, Any], functions: Any) -> None:
    assert Reward.model_validate(given).functions == functions


@pytest.mark.parametrize(
    ("line", "name", "reason"),
    [
        ("--reward.remote_timeout_s 5", "reward.remote_timeout_s", "reward.remote_url names no reward server"),
        ("--reward.remote_url a.py:f --reward.remote_retries 1", "reward.remote_retries", "names no reward server"),
        ("--reward.remote_batch_size 5", "reward.remote_batch_size", "names no reward server"),
        ("--reward.remote_images data", "reward.remote_images", "names no reward server"),
        (f"--reward.remote_url {ONE} --reward.num_workers 2", "reward.num_workers", "no reward function scores"),
        (f"{SCORER} --reward.time_limit_s 2", "reward.time_limit_s", "no reward function scores"),
        ("--reward.pass_env A_KEY", "reward.pass_env", "names no function of your own"),
        (
            f"{SCORER} --reward.max_failed_fraction 0.5",
            "reward.max_failed_fraction",
            "no reward function or server scores",
        ),
        ("--reward.model_weight 0.5", "reward.model_weight", "there is no reward.model_name_or_path"),
        ("--reward.normalize_enable", "reward.normalize_enable", "there is no reward.model_name_or_path"),
        ("--reward.num_gpus_per_node 2", "reward.num_gpus_per_node", "there is no reward model"),
        ("--reward.offload", "reward.offload", "there is no reward model"),
        (f"{SCORER} --reward.process_weight 2", "reward.process_weight", "no reward.process_model_name_or_path"),
        ("--reward.process_separator x", "reward.process_separator", "no reward.process_model_name_or_path"),
        (
            "--reward.process_model_name_or_path j --reward.normalize_enable",
            "reward.normalize_enable",
            "there is no reward.model_name_or_path",
        ),
    ],
)
def test_a_setting_that_would_not_be_read_is_refused(line: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rl(line)
    assert str(caught.value).startswith(f"{name} would not be read: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        f"--reward.remote_url {ONE} --reward.remote_retries 0 --reward.remote_images hash --reward.remote_weight -1",
        f'--reward.remote_url {ONE} --reward.functions {{"math":1}} --reward.num_workers 2',
        f"{SCORER} --reward.model_weight 0.5 --reward.normalize_enable --reward.offload --reward.num_gpus_per_node 2",
        "--reward.process_model_name_or_path j --reward.process_weight 2 --reward.num_nodes 2",
        f'{SCORER} --reward.process_model_name_or_path j --reward.functions {{"math":1,"format":0.1}}',
    ],
)
def test_valid_combinations_are_accepted(line: str) -> None:
    rl(line)


def test_step_rewards_count_in_filtering() -> None:
    rl("--reward.process_model_name_or_path j --algo.dynamic_filtering_enable")


def test_evaluation_asks_functions_servers_and_models() -> None:
    needed = ["--actor.model_name_or_path", "m", "--eval.dataset", "d"]
    assert load(EvalConfig, [*needed, "--reward.remote_url", ONE]).reward.servers == (ONE,)
    by_model = load(EvalConfig, [*needed, "--reward.model_name_or_path", "scorer", "--train.colocate_all"])
    assert by_model.reward.functions == {}
    assert by_model.pools == [frozenset({"vllm", "reward_model", "process_model"})]
    with pytest.raises(ConfigError, match="vlmrl eval does not have it; vlmrl rl does"):
        load(EvalConfig, [*needed, "--reward.clip_range", "[-1, 1]"])
    with pytest.raises(ConfigError, match=r"reward\.offload would not be read: there is no reward model"):
        load(EvalConfig, [*needed, "--reward.offload"])


def test_a_separator_of_line_breaks_survives_the_file(tmp_path: Path) -> None:
    config = rl("--reward.process_model_name_or_path j")
    assert config.reward.process_separator == "\n\n"
    dump_yaml(config, tmp_path / "config.yaml")
    again = load(RlConfig, ["--config", str(tmp_path / "config.yaml")])
    assert again.reward.process_separator == "\n\n"


# --- vlmrl serve-rm ---------------------------------------------------------------------------------------------------


def test_a_model_or_a_function_is_served() -> None:
    model = served(f"{SCORER} --reward.normalize_enable --serve.port 6000 --ds.param_dtype fp32 --data.max_pixels 9000")
    assert (model.serve.host, model.serve.port, model.reward.model_name_or_path) == ("127.0.0.1", 6000, "scorer")
    function = served("--reward.remote_url a.py:f --reward.num_workers 2 --serve.max_batch 4 --serve.max_queue 8")
    assert (function.reward.user_function, function.serve.max_queue) == ("a.py:f", 8)
    assert function.reward.functions == {}
    built_in = served('--reward.functions {"math":1,"format":0.1}')
    assert built_in.reward.functions == {"math": 1.0, "format": 0.1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "give either reward.model_name_or_path, or functions"),
        (f"{SCORER} --reward.remote_url a.py:f", "give either reward.model_name_or_path, or functions"),
        (f'{SCORER} --reward.functions {{"math":1}}', "give either reward.model_name_or_path, or functions"),
        (f"--reward.remote_url {ONE}", "names another server: give the path/to/file.py:function that is to be served"),
        (f"{SCORER} --serve.port -1", "greater than or equal to 0"),
        (f"{SCORER} --serve.port 65536", "less than or equal to 65535"),
        (f"{SCORER} --serve.max_batch 64 --serve.max_queue 32", "serve.max_queue 32 does not hold a batch"),
        (f"{SCORER} --reward.num_workers 2", "a reward model is served, not functions"),
        ("--reward.remote_url a.py:f --data.max_pixels 9000", "functions are served, not a reward model"),
        ("--reward.remote_url a.py:f --reward.normalize_enable", "functions are served, not a reward model"),
        (f"{SCORER} --reward.model_weight 2", "vlmrl serve-rm does not have it; vlmrl rl does"),
        (f"{SCORER} --serve.token secret", "no such setting"),
    ],
)
def test_invalid_serve_settings_are_one_line(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        served(line)
    assert "\n" not in str(caught.value)
