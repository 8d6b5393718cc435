"""The flags of OpenRLHF's programs besides train_ppo_ray are carried, have another name here, or are refused with a
reason."""

from pathlib import Path

import pytest

from vlmrl.config.load import load
from vlmrl.config.openrlhf import REFUSED
from vlmrl.config.openrlhf_stages import REFUSED_BY_VERB, RENAMED
from vlmrl.config.serving import ServeConfig
from vlmrl.config.stages import DpoConfig, RmConfig, SftConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verb_list import VERBS
from vlmrl.config.verbs import MergeConfig
from vlmrl.errors import ConfigError

TRAIN_SFT = Path(__file__).with_name("openrlhf_sft_flags.txt").read_text().split()
TRAIN_RM = Path(__file__).with_name("openrlhf_rm_flags.txt").read_text().split()
TRAIN_DPO = Path(__file__).with_name("openrlhf_dpo_flags.txt").read_text().split()
SERVE_RM = [
    *("reward.model_name_or_path", "reward.normalize_enable", "ds.value_head_prefix", "data.max_len", "port", "host"),
    *("ds.load_in_4bit", "ds.param_dtype", "ds.attn_implementation", "ds.experts_implementation", "ds.packing_samples"),
    *("data.disable_fast_tokenizer", "batch_size", "use_ms"),
]
LORA_COMBINER = ["model_path", "lora_path", "output_path", "is_rm", "ds.param_dtype"]
NEEDED: dict[type[VerbConfig], list[str]] = {
    SftConfig: ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"],
    RmConfig: ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"],
    DpoConfig: ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d"],
    ServeConfig: ["--reward.model_name_or_path", "m"],
    MergeConfig: ["--merge.adapter", "a", "--merge.output", "o"],
}


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        *((SftConfig, flag) for flag in TRAIN_SFT),
        *((RmConfig, flag) for flag in TRAIN_RM),
        *((DpoConfig, flag) for flag in TRAIN_DPO),
        *((ServeConfig, flag) for flag in SERVE_RM),
        *((MergeConfig, flag) for flag in LORA_COMBINER),
    ],
)
def test_each_flag_is_carried_renamed_or_refused_with_a_reason(kind: type[VerbConfig], flag: str) -> None:
    if flag in kind.settings():
        return
    with pytest.raises(ConfigError) as caught:
        load(kind, [*NEEDED[kind], f"--{flag}", "1"])
    message = str(caught.value).removeprefix(f"--{flag}: ")
    words = message.removesuffix(" here").split()
    is_setting = words[0] == "is" and words[1].removeprefix("--") in kind.settings()
    assert is_setting or message.startswith(("not built yet: ", "replaced by ", "never: ")), message


def test_new_names_exist_and_old_ones_are_not_ours() -> None:
    ours = {name for verb in VERBS for name in verb.settings()}
    for name, renamed in RENAMED.items():
        assert set(renamed.ours) <= ours | REFUSED.keys(), name
        assert renamed.ours or renamed.note.startswith("never: ")
        assert name not in ours
    for verb, flags in REFUSED_BY_VERB.items():
        (kind,) = (kind for kind in VERBS if kind.verb == verb)
        assert not flags.keys() & kind.settings().keys()
        assert all(reason.startswith("never: ") for reason in flags.values())


def test_some_are_explained() -> None:
    def mistake(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(RmConfig, [*NEEDED[RmConfig], *words])
        return str(caught.value)

    assert mistake("--model.margin_loss_enable") == (
        "--model.margin_loss_enable: is --data.margin_key here: it names the column, which is `margin` in OpenRLHF"
    )
    assert mistake("--data.dataset", "d") == "--data.dataset: is --data.prompt_dataset here"
    assert mistake("--model.loss_type", "logexp") == "--model.loss_type: is --rm.loss_type here"
