from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.config.dump import dump_yaml
from vlmrl.config.load import load
from vlmrl.config.stages import DpoConfig
from vlmrl.errors import ConfigError

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]


def read(line: str = "") -> DpoConfig:
    return load(DpoConfig, [*NEEDED, *line.split()])


@pytest.mark.parametrize(
    ("line", "has_reference", "is_base"),
    [
        ("", True, False),
        ("--dpo.precompute_reference", False, False),
        ("--ds.lora.rank 4", False, True),
        ("--ds.lora.rank 4 --dpo.precompute_reference", False, False),
        ("--ds.lora.rank 4 --ref.model_name_or_path r", True, False),
        ("--dpo.loss orpo", False, False),
        ("--dpo.loss simpo --ds.lora.rank 4", False, False),
    ],
)
def test_the_reference_is_a_copy_the_base_or_computed_before(line: str, has_reference: bool, is_base: bool) -> None:
    config = read(line)
    assert (config.has_reference, config.reference_is_base) == (has_reference, is_base)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--dpo.loss ipo --dpo.label_smoothing 0.1", "dpo.loss ipo does not have it; dpo, mpo have"),
        ("--dpo.simpo_gamma 1", "dpo.loss dpo does not have it; simpo has"),
        ("--dpo.loss kto --data.chosen_key good", "dpo.loss kto does not have it"),
        ("--data.label_key good", "dpo.loss dpo does not have it; kto has"),
        ("--dpo.loss orpo --dpo.nll_loss_coef 1", "dpo.loss orpo does not have it"),
        ("--dpo.loss orpo --dpo.precompute_reference", "dpo.loss orpo does not have it"),
        ("--dpo.loss orpo --ref.model_name_or_path r", "dpo.loss orpo has no reference"),
        ("--ds.lora.rank 4 --ref.num_gpus_per_node 2", "the actor with its adapters off"),
        ("--dpo.precompute_reference --ref.num_gpus_per_node 2", "with the actor's ranks"),
        ("--dpo.precompute_reference --ref.model_name_or_path r", "names another model, r: leave one of them out"),
        ("--dpo.loss kto --train.batch_size 1", "set train.batch_size above 1"),
        ("--ds.lora.rank 4 --ds.lora.dropout 0.1", "makes each log-ratio to the reference noisy"),
        ("--data.margin_key m", "--data.margin_key: "),
        ("--dpo.label_smoothing 0.5", "less than 0.5"),
    ],
)
def test_a_setting_that_has_no_effect_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(line)


def test_losses_without_a_reference_may_have_dropout() -> None:
    assert read("--dpo.loss simpo --ds.lora.rank 4 --ds.lora.dropout 0.1").ds.lora.dropout == 0.1


def test_the_default_strength_depends_on_the_loss(tmp_path: Path) -> None:
    assert [read(f"--dpo.loss {loss}").dpo.beta for loss in ("dpo", "orpo", "simpo")] == [0.1, 0.1, 2.0]
    assert read("--dpo.loss simpo --dpo.beta 0.5").dpo.beta == 0.5
    dump_yaml(read("--dpo.loss simpo"), tmp_path / "config.yaml")
    assert load(DpoConfig, ["--config", str(tmp_path / "config.yaml")]).dpo.beta == 2.0


def test_cdpo_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"dpo\.loss.*cDPO is dpo with .* wrong labels: give --dpo\.label_smoothing"):
        read("--dpo.loss cdpo")


def test_mpo_has_an_nll_term_by_default() -> None:
    assert read("--dpo.loss mpo").dpo.nll_coef == 1.0
    assert read("--dpo.loss mpo --dpo.nll_loss_coef 0.5").dpo.nll_coef == 0.5
    assert read().dpo.nll_coef == 0.0


def test_adapters_that_were_trained_before_are_part_of_the_reference() -> None:
    given = "--ds.lora.rank 4 --actor.adapter_name_or_path a"
    with pytest.raises(ConfigError, match="with its adapters off it would lack a "):
        read(given)
    assert read(f"{given} --dpo.precompute_reference").dpo.precompute_reference
    assert read(f"{given} --dpo.loss simpo").dpo.loss == "simpo"


@pytest.mark.parametrize("setting", ["eval.temperature 1", "reward.functions exact", "rollout.max_new_tokens 9"])
def test_settings_of_sampling_are_read_only_where_responses_are_sampled(setting: str) -> None:
    name = setting.partition(" ")[0]
    with pytest.raises(ConfigError, match=f"{name} would not be read: eval.generate_enable is off"):
        read(f"--eval.dataset e --{setting}")
    generation = read(f"--eval.dataset e --{setting} --eval.generate_enable true").generation
    assert generation is not None
    assert generation.max_sequence_tokens == generation.data.max_len + generation.rollout.max_new_tokens
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        read("--eval.generate_enable true")
