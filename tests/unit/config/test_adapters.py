"""Errors about adapters and 4-bit weights, as a user sees them."""

import pytest

from vlmrl.config.adapters import reason_to_merge
from vlmrl.config.bench_verbs import StepBench, SyncBench
from vlmrl.config.load import load
from vlmrl.config.lora import Lora
from vlmrl.config.stages import SftConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verbs import MergeConfig, RlConfig
from vlmrl.errors import ConfigError

MODEL = ["--actor.model_name_or_path", "m"]
DATA = ["--data.prompt_dataset", "d"]


def read(line: str, kind: type[VerbConfig] = RlConfig) -> VerbConfig:
    data = DATA if kind in (RlConfig, SftConfig) else []
    return load(kind, [*MODEL, *data, *line.split()])


LORA = "--ds.lora.rank 8"
QLORA = f"{LORA} --ds.load_in_4bit"
ONE_PASS = "--rollout.batch_size 4 --rollout.n_samples_per_prompt 2 --train.batch_size 8"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ds.load_in_4bit", "ds.load_in_4bit freezes the base, .*: set ds.lora.rank above 0"),
        ("--ds.lora.rank 513", "ds.lora.rank 513 is above 512, the largest that vLLM serves: lower it"),
        ("--ds.lora.rank -1", "greater than or equal to 0"),
        (f"{LORA} --ds.lora.dropout 1.0", "less than 1"),
        (f"{LORA} --ds.lora.target_modules []", "at least 1 item"),
        (
            f"{LORA} --ds.lora.target_modules vision --actor.freeze_visual_encoder",
            "would change what actor.freeze_visual_encoder freezes",
        ),
        (f"{QLORA} --ds.zero_stage 3 --ds.quant_storage uint8", "cannot be sharded by ds.zero_stage 3.* use bf16"),
        (f"{QLORA} --ds.zero_stage 3 --ds.quant_storage fp32", "cannot be sharded by ds.zero_stage 3.* use bf16"),
        (f"{QLORA} --ds.quant_storage fp32", "would not survive ds.param_dtype bf16.* use uint8"),
        (f"{LORA} --actor.optim adam_8bit --ds.adam_offload", "actor.optim adam_8bit has its own"),
        (
            f"{LORA} --ds.lora.dropout 0.1 {ONE_PASS}",
            "dropout 0.1 makes the update's forward .* set it to 0",
        ),
    ],
)
def test_a_contradiction_is_one_line_with_a_fix(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        LORA,
        "--ds.lora.rank 512",
        QLORA,
        f"{QLORA} --ds.zero_stage 3",
        f"{QLORA} --ds.zero_stage 3 --ds.quant_storage bf16",
        f"{QLORA} --ds.zero_stage 3 --ds.param_dtype fp32 --ds.quant_storage fp32",
        f"{QLORA} --ds.zero_stage 2 --ds.quant_storage uint8 --vllm.qlora_base bitsandbytes",
        f"{LORA} --ds.lora.target_modules all --actor.freeze_visual_encoder",
        f"{LORA} --ds.lora.target_modules q_proj v_proj --ds.lora.use_rslora",
        f"{LORA} --actor.optim adam_8bit_paged",
        # Two passes: a reference is compared with the policy before the step, or a batch takes two steps.
        f"{LORA} --ds.lora.dropout 0.1 {ONE_PASS} --algo.kl.init_coef 0.1",
        f"{LORA} --ds.lora.dropout 0.1 {ONE_PASS} --train.max_epochs 2",
        f"{LORA} --ds.lora.dropout 0.1 {ONE_PASS} --train.batch_size 4",
    ],
)
def test_valid_combinations_are_accepted(line: str) -> None:
    read(line)


def test_supervised_training_accepts_adapters_and_dropout() -> None:
    config = read(f"{QLORA} --ds.lora.dropout 0.1", SftConfig)
    assert isinstance(config, SftConfig)
    assert (config.ds.lora.rank, config.ds.lora.dropout, config.ds.load_in_4bit) == (8, 0.1, True)
    with pytest.raises(ConfigError, match=r"set ds.lora.rank above 0"):
        read("--ds.load_in_4bit", SftConfig)


def test_the_reference_is_the_actor_with_its_adapters_off_unless_another_is_named() -> None:
    def reference_is_base(line: str) -> bool:
        config = read(line)
        assert isinstance(config, RlConfig)
        return config.reference_is_base

    assert reference_is_base(f"{LORA} --algo.kl.init_coef 0.1")
    assert not reference_is_base("--algo.kl.init_coef 0.1")
    assert not reference_is_base(LORA)
    assert not reference_is_base(f"{LORA} --algo.kl.init_coef 0.1 --ref.model_name_or_path other")


def test_benchmarks_take_adapters() -> None:
    read(f"{QLORA} --vllm.qlora_base original", SyncBench)
    read(QLORA, StepBench)
    with pytest.raises(ConfigError, match=r"set ds.lora.rank above 0"):
        read("--ds.load_in_4bit", StepBench)
    with pytest.raises(ConfigError, match="differs in every pass"):
        read(f"{LORA} --ds.lora.dropout 0.1", StepBench)


def test_adapters_that_vllm_cannot_apply_exactly_are_merged() -> None:
    assert reason_to_merge(Lora(rank=8)) is None
    assert reason_to_merge(Lora(rank=8, use_dora=True)) == "ds.lora.use_dora"
    assert reason_to_merge(Lora(rank=8, target_modules=("all-linear", "vision"))) == "ds.lora.target_modules vision"


def test_merging_needs_an_adapter_and_an_output_folder() -> None:
    with pytest.raises(ConfigError) as caught:
        load(MergeConfig, [])
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == ["--merge.adapter", "--merge.output"]
    config = load(MergeConfig, ["--merge.adapter", "a", "--merge.output", "b", "--ds.load_in_4bit"])
    assert config.ds.load_in_4bit
    with pytest.raises(ConfigError, match="vlmrl merge does not have it"):
        load(MergeConfig, ["--merge.adapter", "a", "--merge.output", "b", "--ds.lora.rank", "8"])
