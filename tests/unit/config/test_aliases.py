"""Names of older OpenRLHF, TRL and Hugging Face's Trainer lead to ours."""

from pathlib import Path

import pytest

from vlmrl.config.aliases import ALIASES, alias_of
from vlmrl.config.load import load
from vlmrl.config.openrlhf import REFUSED
from vlmrl.config.stages import DpoConfig, RmConfig, SftConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verb_list import VERBS
from vlmrl.config.verbs import EvalConfig, MergeConfig, RlConfig
from vlmrl.errors import ConfigError

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"]
OLD_FLAGS = Path(__file__).with_name("openrlhf_old_flags.txt").read_text().split()
"""The flags of train_ppo_ray and train_sft in OpenRLHF 0.9."""
NAMED_IN_SCRIPTS = [
    *("learning_rate", "num_train_epochs", "report_to", "resume_from_checkpoint", "gradient_accumulation_steps"),
    *("save_total_limit", "num_generations", "beta", "per_device_train_batch_size", "max_completion_length"),
    *("max_prompt_length", "use_vllm", "vllm_mode", "use_peft", "lora_r", "bf16", "warmup_ratio", "output_dir"),
]


def mistakes(*flags: str, kind: type[VerbConfig] = RlConfig, needed: bool = True) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(kind, [*(NEEDED if needed else []), *flags])
    return [line.strip() for line in str(caught.value).splitlines() if "mistakes in the settings" not in line]


@pytest.mark.parametrize("name", [*OLD_FLAGS, *NAMED_IN_SCRIPTS])
def test_each_alias_has_a_setting_or_a_reason(name: str) -> None:
    (line,) = mistakes(f"--{name}", "1")
    message = line.removeprefix(f"--{name}: ")
    words = message.split()
    is_setting = words[0] == "is" and words[1].removeprefix("--") in RlConfig.settings()
    assert is_setting or message.startswith(("is --", "not built yet: ", "replaced by ", "never: ")), line


def test_every_alias_exists() -> None:
    known = {name for verb in VERBS for name in verb.settings()} | REFUSED.keys()
    for name, alias in ALIASES.items():
        assert set(alias.ours) <= known, name
        assert alias.ours or alias.note.startswith(("not built yet: ", "never: ")), name
        assert name == name.replace("-", "_")
        # A name of ours needs no alias.
        assert name not in known - REFUSED.keys(), name


def test_an_alias_is_explained_in_one_line() -> None:
    assert mistakes("--vllm_num_engines", "2", "--learning-rate=1e-5") == [
        "--vllm_num_engines: is --vllm.num_engines here",
        "--learning-rate: is --actor.adam.lr here",
    ]
    (line,) = mistakes("--gradient_accumulation_steps", "4")
    assert line.startswith("--gradient_accumulation_steps: is --train.batch_size here: it counts the samples of one")
    assert mistakes("--zpg", "8") == [f"--zpg: {REFUSED['ds.zpg']}"]


def test_a_required_setting_under_an_alias_is_not_also_reported_missing() -> None:
    assert mistakes("--pretrain", "m", "--prompt_data", "d", needed=False) == [
        "--pretrain: is --actor.model_name_or_path here",
        "--prompt_data: is --data.prompt_dataset here",
    ]


def test_an_alias_means_the_setting_that_the_verb_has() -> None:
    assert mistakes("--num_train_epochs", "2") == ["--num_train_epochs: is --train.num_episodes here"]
    assert mistakes("--num_train_epochs", "2", kind=SftConfig) == ["--num_train_epochs: is --train.max_epochs here"]
    assert mistakes("--num_generations", "2", kind=SftConfig) == [
        "--num_generations: is --rollout.n_samples_per_prompt in vlmrl rl; vlmrl sft does not have it"
    ]
    lines = mistakes("--pretrain", "m", "--dataset", "d", kind=EvalConfig, needed=False)
    assert lines[1] == "--dataset: is --eval.dataset here"
    lines = mistakes("--model", "m", "--output_dir", "o", "--lora_path", "a", kind=MergeConfig, needed=False)
    assert [line.split()[2] for line in lines] == ["--merge.model_name_or_path", "--merge.output", "--merge.adapter"]


TRL_NAMES: dict[type[VerbConfig], list[str]] = {
    DpoConfig: [
        *(
            "activation_offloading",
            "beta",
            "cpo_alpha",
            "desirable_weight",
            "f_divergence_type",
            "generate_during_eval",
        ),
        *("label_smoothing", "ld_alpha", "learning_rate", "loss_type", "loss_weights"),
        *("max_completion_length", "max_length", "max_prompt_length", "packing", "pad_to_multiple_of", "padding_free"),
        *("precompute_ref_batch_size", "precompute_ref_log_probs", "ref_model_sync_steps", "router_aux_loss_coef"),
        *("rpo_alpha", "simpo_gamma", "sync_ref_model", "truncation_mode", "undesirable_weight", "use_weighting"),
    ],
    RmConfig: ["center_rewards_coefficient", "chat_template_path", "disable_dropout", "max_length", "dataset_num_proc"],
    SftConfig: [
        *("assistant_only_loss", "completion_only_loss", "dataset_kwargs", "dataset_text_field", "eos_token"),
        *("eval_packing", "max_length", "packing", "packing_strategy", "padding_free", "shuffle_dataset"),
        "truncation_mode",
    ],
}
"""Names in TRL's DPOConfig, KTOConfig, CPOConfig and ORPOConfig, in RewardConfig, and in SFTConfig."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in TRL_NAMES.items() for name in names],
)
def test_trls_names_lead_to_settings_of_the_verb_or_to_a_reason(kind: type[VerbConfig], name: str) -> None:
    (line,) = mistakes(f"--{name}", "1", kind=kind)
    message = line.removeprefix(f"--{name}: ")
    words = message.split()
    is_setting = words[0] == "is" and words[1].removeprefix("--").removesuffix(":") in kind.settings()
    elsewhere = "does not have it" in message
    assert is_setting or elsewhere or message.startswith(("not built yet: ", "never: ")), line


def test_trls_settings_of_preferences_have_their_names_here() -> None:
    assert mistakes("--beta", "0.1", kind=DpoConfig) == ["--beta: is --dpo.beta here"]
    assert mistakes("--beta", "0.1") == ["--beta: is --algo.kl.init_coef here"]
    assert mistakes("--desirable_weight", "2", kind=DpoConfig) == [
        "--desirable_weight: is --dpo.kto_desirable_weight here"
    ]
    (line,) = mistakes("--loss_type", "ipo", kind=DpoConfig)
    assert line.startswith("--loss_type: is --dpo.loss here: ")
    assert line.endswith("in dpo, sigmoid and robust are dpo, bco_pair is bco, and several are mpo")
    assert mistakes("--rpo_alpha", "1", kind=DpoConfig)[0].startswith("--rpo_alpha: is --dpo.nll_loss_coef here")


def test_errors_in_a_file_use_the_names_of_files(tmp_path: Path) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text("learning_rate: 1e-5\ntrain:\n  num_generations: 4\n")
    assert mistakes("--config", str(file)) == [
        f"{file}:1: learning_rate: is actor.adam.lr here",
        f"{file}:3: train.num_generations: is rollout.n_samples_per_prompt here",
    ]


def test_names_in_our_sections_are_no_aliases() -> None:
    known = RlConfig.settings()
    assert alias_of("critic.lr", known) is None
    assert alias_of("train.output_dir", known) is None
    alias = alias_of("algo.beta", known)
    assert alias is not None
    assert alias.ours[0] == "algo.kl.init_coef"
