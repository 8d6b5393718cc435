import pytest

from vlmrl.config.ckpt import Ckpt
from vlmrl.config.ds import Ds
from vlmrl.config.names import all_but, is_given, nearest, setting_value, settings_named_in
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import EvalConfig, RlConfig

NAMES = list(RlConfig.settings())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train.bach_size", "train.batch_size"),
        ("actor.lr", "actor.adam.lr"),
        ("actor.model-name-or-path", "actor.model_name_or_path"),
        ("model_name_or_path", "actor.model_name_or_path"),
        ("actor.model", "actor.model_name_or_path"),
        ("rollout.max_len", "data.max_len"),
        ("wandb.project", "logger.wandb.project"),
        ("qqq", None),
    ],
)
def test_a_misspelt_name_finds_the_intended_one(written: str, meant: str | None) -> None:
    assert nearest(written, NAMES) == meant


def test_settings_have_full_names_without_those_of_sections() -> None:
    assert {"actor.adam.lr", "logger.wandb.project", "train.seed"} <= set(NAMES)
    assert not {"actor", "actor.adam", "logger.wandb"} & set(NAMES)
    assert {"actor", "actor.adam", "logger.wandb"} <= set(RlConfig.sections())


def test_all_but_omits_the_kept_names() -> None:
    kept = {"ckpt.save_steps", "ckpt.max_num", "ckpt.load_enable", "ckpt.save_on_stop"}
    assert all_but(Ckpt, "ckpt", "output_dir", "best_metric_key") == kept
    kept = {"ds.lora.rank", "ds.lora.alpha", "ds.param_dtype"}
    assert not kept & all_but(Ds, "ds", "lora", "param_dtype")
    assert "ds.zero_stage" in all_but(Ds, "ds", "lora")
    with pytest.raises(AssertionError, match="no_such"):
        all_but(Ckpt, "ckpt", "no_such")


def test_a_verb_has_no_settings_of_others() -> None:
    assert "rollout.max_new_tokens" in EvalConfig.settings()
    assert "rollout.n_samples_per_prompt" not in EvalConfig.settings()
    assert "data.output_key" in SftConfig.settings()
    assert "data.output_key" not in RlConfig.settings()
    assert "actor.adam" not in EvalConfig.sections()


def test_a_given_default_counts_as_given() -> None:
    config = RlConfig.model_validate(
        {"actor": {"model_name_or_path": "m"}, "data": {"prompt_dataset": "d"}, "train": {"seed": 42}}
    )
    assert setting_value(config, "train.seed") == setting_value(config, "train.seed") == 42
    assert is_given(config, "train.seed")
    assert not is_given(config, "train.timeout_s")
    assert not is_given(config, "actor.adam.lr")


def test_settings_are_found_in_a_message() -> None:
    text = "train.batch_size 3 does not divide rollout.batch_size; see run.yaml, train.batch_size."
    assert settings_named_in(text, NAMES) == ["train.batch_size", "rollout.batch_size"]
