"""config.yaml shows every setting and repeats the run."""

from pathlib import Path

import pytest
import yaml

from vlmrl.config.dump import dump_yaml
from vlmrl.config.load import load
from vlmrl.config.names import setting_value
from vlmrl.config.serving import ServeConfig
from vlmrl.config.stages import SftConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verbs import EvalConfig, RlConfig

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d?size=3&families=a+b"]

RUNS: list[tuple[type[VerbConfig], list[str]]] = [
    (RlConfig, NEEDED),
    (SftConfig, NEEDED),
    (SftConfig, [*NEEDED, "--ds.packing_samples", "false", "--ckpt.save_steps", "5"]),
    (EvalConfig, ["--actor.model_name_or_path", "m", "--eval.dataset", "d", "--eval.temperature", "0"]),
    (RlConfig, [*NEEDED, "--algo.kl.init_coef", "1e-3", "--ref.num_gpus_per_node", "2", "--train.colocate_actor_ref"]),
    (RlConfig, [*NEEDED, "--algo.advantage.estimator", "reinforce_baseline", "--algo.advantage.gamma", "0.9"]),
    (RlConfig, [*NEEDED, "--algo.advantage.estimator", "gae", "--reward.model_name_or_path", "scorer"]),
    (RlConfig, [*NEEDED, "--actor.policy_loss_type", "gspo", "--algo.advantage.is_correction_enable", "false"]),
    (ServeConfig, ["--reward.model_name_or_path", "scorer"]),
    (ServeConfig, ["--reward.remote_url", "a.py:f"]),
    (RlConfig, [*NEEDED, "--actor.eps_clip_low_high", "0.2", "0.28", "--actor.adam.lr", "1e-5", "--eval.dataset", "e"]),
    (
        RlConfig,
        [
            *[*NEEDED, "--data.system_prompt", "Say: \\boxed{} # not a comment\nand 'quotes', \"too\"."],
            *["--reward.functions", "{exact: 1, format: 0.5}", "--data.image_root", "null", "--data.input_key", "no"],
            *["--logger.wandb.project", "p", "--rollout.top_p", "0.5", "--data.prompt_split", "1e3"],
        ],
    ),
]


@pytest.mark.parametrize(("kind", "flags"), RUNS)
def test_the_file_repeats_the_run(kind: type[VerbConfig], flags: list[str], tmp_path: Path) -> None:
    config = load(kind, flags)
    dump_yaml(config, tmp_path / "config.yaml")
    again = load(kind, ["--config", str(tmp_path / "config.yaml")])
    assert again == config
    dump_yaml(again, tmp_path / "again.yaml")
    first, *rest = (tmp_path / "config.yaml").read_text().splitlines()
    assert (tmp_path / "again.yaml").read_text().splitlines()[1:] == rest
    assert first == f"# Written by vlmrl: vlmrl {kind.verb} --config config.yaml repeats the run"


@pytest.mark.parametrize(("kind", "flags"), RUNS)
def test_every_setting_is_in_the_file_and_what_is_not_read_is_a_comment(
    kind: type[VerbConfig], flags: list[str], tmp_path: Path
) -> None:
    config = load(kind, flags)
    dump_yaml(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    tree = yaml.safe_load(text)
    for name in kind.settings():
        node, *parts = tree, *name.split(".")
        if name in config.unread():
            assert f"# {parts[-1]}: " in text
            assert config.unread()[name] in text
            continue
        for part in parts:
            node = node[part]
        held = setting_value(config, name)
        assert type(config).settings()[name] is not None
        assert (list(held) if isinstance(held, tuple) else held) == (float(node) if isinstance(held, float) else node)


def test_derived_settings_are_comments_and_stay_derived(tmp_path: Path) -> None:
    dump_yaml(load(RlConfig, [*NEEDED, "--algo.advantage.estimator", "dr_grpo"]), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "loss_agg: null  # constant" in text
    assert "max_tokens_per_gpu: null  # 16192" in text
    changed = load(RlConfig, ["--config", str(tmp_path / "config.yaml"), "--algo.advantage.estimator", "rloo"])
    assert changed.aggregation == "token"


def test_gspo_has_its_papers_clip_range_when_the_run_is_repeated_too(tmp_path: Path) -> None:
    config = load(RlConfig, [*NEEDED, "--actor.policy_loss_type", "gspo"])
    dump_yaml(config, tmp_path / "config.yaml")
    assert "# eps_clip: 0.2  # not read: " in (tmp_path / "config.yaml").read_text()
    assert load(RlConfig, ["--config", str(tmp_path / "config.yaml")]).actor.clip_range == (3e-4, 4e-4)


def test_defaults_taken_from_the_actor_are_shown(tmp_path: Path) -> None:
    gae = ["--algo.advantage.estimator", "gae", "--actor.freeze_projector", "--ds.zero_stage", "3"]
    dump_yaml(load(RlConfig, [*NEEDED, *gae]), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "  model_name_or_path: null  # m\n" in text
    assert "  freeze_projector: null  # True\n" in text
    assert "  zero_stage: null  # 3\n" in text
