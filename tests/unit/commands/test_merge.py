"""A merged model computes what the base with its adapter computes."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoProcessor, AutoTokenizer, PreTrainedModel

from vlmrl.commands.merge import merge
from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.config.load import load
from vlmrl.config.lora import Lora
from vlmrl.config.verbs import MergeConfig
from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.models.adapter_files import Base, base_fingerprint, read_adapter, write_adapter
from vlmrl.models.adapter_plan import AdapterPlan, plan_adapter
from vlmrl.models.adapters import adapter_tensors, inject_adapter
from vlmrl.models.load import load_model
from vlmrl.models.quantize import four_bit
from vlmrl.models.value_head import value_net
from vlmrl.plugins import processor

WORD = torch.arange(5, 40)[None]


@dataclass(frozen=True)
class Trained:
    """A base, an adapter of it in a folder, and what the two make of `WORD` together."""

    base: Path
    adapter: Path
    logits: Tensor


def logits(net: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits_of_word: Tensor = net.eval()(input_ids=WORD).logits
    return logits_of_word


def trained(base: Path, adapter: Path, *, lora: Lora, in_4bit: bool = False) -> Trained:
    """An adapter whose matrices are all but small, on a base of fp32 or NF4."""
    reader = processor(str(base), min_pixels=3136, max_pixels=100_000)
    plan = plan_adapter(Model(model_name_or_path=str(base)), lora, reader)
    assert plan is not None
    ds = Ds(param_dtype="fp32", load_in_4bit=in_4bit, lora=lora)
    net = load_model(str(base), dtype=torch.float32, attn_implementation=None, four_bit=four_bit(ds, reader))
    shaken(net, plan)
    base_record = Base(path=str(base), fingerprint=base_fingerprint(str(base)), is_four_bit=in_4bit)
    write_adapter(adapter, plan, adapter_tensors(net), base=base_record)
    return Trained(base, adapter, logits(net))


def shaken(net: PreTrainedModel, plan: AdapterPlan) -> None:
    inject_adapter(net, plan)
    torch.manual_seed(3)
    with torch.no_grad():
        for _, parameter in adapter_tensors(net):
            parameter.add_(torch.randn_like(parameter) * 0.2)


def merged(run: Trained, output: Path, *more: str) -> Path:
    words = ["--merge.adapter", str(run.adapter), "--merge.output", str(output), "--ds.param_dtype", "fp32"]
    base = [] if "--merge.model_name_or_path" in more else ["--merge.model_name_or_path", str(run.base)]
    merge(load(MergeConfig, [*words, *base, *more]))
    return output


def merged_with_the_base_it_names(run: Trained, output: Path) -> None:
    words = ["--merge.adapter", str(run.adapter), "--merge.output", str(output), "--ds.param_dtype", "fp32"]
    merge(load(MergeConfig, words))


def read_back(path: Path) -> PreTrainedModel:
    return load_model(str(path), dtype=torch.float32, attn_implementation=None)


@pytest.mark.parametrize(
    ("family", "lora", "in_4bit"),
    [
        ("qwen3", Lora(rank=4), False),
        ("qwen3", Lora(rank=4), True),
        ("qwen2_5_vl", Lora(rank=4, use_rslora=True), False),
        ("qwen2_5_vl", Lora(rank=4, target_modules=("all",)), True),
        ("qwen3_vl", Lora(rank=4, use_dora=True), False),
    ],
)
def test_the_merged_model_is_the_model_with_its_adapter_on(
    family: tiny.Family, lora: Lora, in_4bit: bool, folder: Callable[..., Path], tmp_path: Path
) -> None:
    run = trained(folder(family), tmp_path / "adapter", lora=lora, in_4bit=in_4bit)
    base = read_back(run.base)
    assert (logits(base) - run.logits).abs().max() > 1e-2
    result = read_back(merged(run, tmp_path / "merged"))
    assert (logits(result) - run.logits).abs().max() < 1e-4
    assert not any(getattr(m, "quant_state", None) for m in result.parameters())
    reader = AutoProcessor if family != "qwen3" else AutoTokenizer
    reader.from_pretrained(tmp_path / "merged")


def test_an_adapter_of_4_bits_can_be_added_to_the_weights_of_the_files(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    run = trained(folder("qwen3"), tmp_path / "adapter", lora=Lora(rank=4), in_4bit=True)
    dequantized = read_back(merged(run, tmp_path / "a", "--ds.load_in_4bit", "true"))
    original = read_back(merged(run, tmp_path / "b", "--ds.load_in_4bit", "false"))
    assert (logits(dequantized) - run.logits).abs().max() < 1e-4
    assert (logits(original) - run.logits).abs().max() > 1e-2
    name = "model.layers.0.self_attn.q_proj.weight"
    gap = original.get_parameter(name) - dequantized.get_parameter(name)
    rounding = read_back(run.base).get_parameter(name).abs().max() / 4
    assert 0 < gap.abs().max() < rounding


@pytest.mark.parametrize("in_4bit", [False, True])
def test_a_classifier_gets_its_score_layer_from_the_adapter(
    in_4bit: bool, folder: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    from vlmrl.commands.merge import dequantize
    from vlmrl.models.quantize import prepare_four_bit, quantization

    base = folder("qwen3")
    reader = processor(str(base), min_pixels=3136, max_pixels=100_000)
    more: dict[str, Any] = {}
    if in_4bit:
        bits = four_bit(Ds(param_dtype="fp32", load_in_4bit=True, lora=Lora(rank=4)), reader)
        assert bits is not None
        bare = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        more["quantization_config"] = quantization(bits, bare, dtype=torch.float32)
    net = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=1, **more)
    if in_4bit:
        prepare_four_bit(net)
        dequantize(net)
    config = LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["score"], lora_alpha=16
    )
    peft: PeftModel = get_peft_model(net, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name or "score" in name:
                parameter.normal_(std=0.2)
    peft.eval()
    with torch.no_grad():
        want = peft(input_ids=WORD[:, :-1]).logits
    peft.save_pretrained(tmp_path / "adapter")
    output = merged(
        Trained(base, tmp_path / "adapter", want),
        tmp_path / "merged",
        *("--merge.model_name_or_path", str(base), "--ds.load_in_4bit", str(in_4bit).lower()),
    )
    result = AutoModelForSequenceClassification.from_pretrained(output, dtype=torch.float32).eval()
    with torch.no_grad():
        assert (result(input_ids=WORD[:, :-1]).logits - want).abs().max() < 1e-4


@pytest.mark.parametrize("in_4bit", [False, True])
def test_an_adapter_of_a_vision_reward_model_is_merged_with_its_score_layer(
    in_4bit: bool, folder: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    from vlmrl.commands.merge import dequantize

    base = folder("qwen2_5_vl", tied=True)
    reader = processor(str(base), min_pixels=3136, max_pixels=100_000)
    bits = four_bit(Ds(param_dtype="fp32", load_in_4bit=in_4bit, lora=Lora(rank=4)), reader)
    net = value_net(str(base), dtype=torch.float32, attn_implementation=None, four_bit=bits, head_seed=1)
    if in_4bit:
        dequantize(net)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["score"], lora_alpha=16)
    peft: Any = get_peft_model(net, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name or "score" in name:
                parameter.normal_(std=0.2)
    want = logits(peft)
    peft.save_pretrained(tmp_path / "adapter")
    output = merged(
        Trained(base, tmp_path / "adapter", want),
        tmp_path / "merged",
        *("--merge.model_name_or_path", str(base), "--ds.load_in_4bit", str(in_4bit).lower()),
    )
    result = value_net(str(output), dtype=torch.float32, attn_implementation=None, head_seed=None)
    assert (logits(result) - want).abs().max() < 1e-4
    assert want.abs().max() > 0.1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, folder: Callable[..., Path]) -> Trained:
    return trained(folder("qwen3"), tmp_path_factory.mktemp("plain") / "adapter", lora=Lora(rank=4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_model_has_the_type_of_the_run(plain: Trained, tmp_path: Path, dtype: torch.dtype) -> None:
    run = copied(plain, tmp_path / "a", lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items()}))
    words = ["--merge.adapter", str(run.adapter), "--merge.model_name_or_path", str(run.base), "--merge.output"]
    merge(load(MergeConfig, [*words, str(tmp_path / "merged")]))
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    # The given setting counts, also if the run's settings are unknown.
    merge(load(MergeConfig, [*words, str(tmp_path / "given"), "--ds.param_dtype", "bf16"]))
    (run.adapter / "base.json").unlink()
    merge(load(MergeConfig, [*words, str(tmp_path / "others")]))
    for name in ("given", "others"):
        weights = load_file(tmp_path / name / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_the_base_of_an_adapter_is_found_from_anywhere(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = folder("qwen3")
    monkeypatch.chdir(base.parent)
    trained(Path(base.name), tmp_path / "adapter", lora=Lora(rank=4))
    monkeypatch.chdir("/")
    assert read_adapter(tmp_path / "adapter", flag="merge.adapter").base.path == str(base.absolute())
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(base.absolute()), "PEFT and vLLM read it too"


# ---------------------------------------------------------------- bad input


def copied(run: Trained, to: Path, change: Callable[[dict[str, Tensor]], Any]) -> Trained:
    """The same adapter with other tensors."""
    to.mkdir()
    for file in run.adapter.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, to / "adapter_model.safetensors", metadata={"format": "pt"})
    return replace(run, adapter=to)


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_a_missing_tensor_is_named(plain: Trained, tmp_path: Path, half: str) -> None:
    name = f"base_model.model.model.layers.1.self_attn.k_proj.{half}.weight"
    broken = copied(plain, tmp_path / "a", lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=rf"merge\.adapter: .* lacks the tensor {name}"):
        merged(broken, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_another_base_is_refused(plain: Trained, tmp_path: Path) -> None:
    other = tiny.build("qwen3", tmp_path / "other", size="micro", seed=1)
    with pytest.raises(ConfigError, match="was trained on other weights than those of"):
        merged(plain, tmp_path / "merged", "--merge.model_name_or_path", str(other))


def test_a_missing_base_has_to_be_given(plain: Trained, tmp_path: Path) -> None:
    moved = copied(plain, tmp_path / "a", lambda tensors: None)
    file = moved.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "/no/such/folder"}))
    with pytest.raises(ConfigError, match=r"/no/such/folder.*give it as merge\.model_name_or_path"):
        merged_with_the_base_it_names(moved, tmp_path / "merged")
    merged(moved, tmp_path / "merged", "--merge.model_name_or_path", str(plain.base))
    with pytest.raises(ConfigError, match=r"merge\.model_name_or_path: there is no folder \./nothing"):
        merged(moved, tmp_path / "again", "--merge.model_name_or_path", "./nothing")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_base_that_an_adapter_names_is_read_only_after_confirmation(
    plain: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigError, match=r"names '.*' as its base: .* give it as merge\.model_name_or_path") as caught:
        merged_with_the_base_it_names(plain, tmp_path / "merged")
    assert "\n" not in str(caught.value)
    for refusal in ("\n", "no\n"):
        monkeypatch.setattr(sys, "stdin", Terminal(refusal))
        with pytest.raises(ConfigError, match="nothing was merged"):
            merged_with_the_base_it_names(plain, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    merged_with_the_base_it_names(plain, tmp_path / "merged")
    assert repr(str(plain.base)) in capsys.readouterr().out
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_an_adapter_of_another_shape_is_refused_without_a_fingerprint(plain: Trained, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    odd = copied(plain, tmp_path / "a", lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj is .* give the base"):
        merged(odd, tmp_path / "merged")


def test_a_tensor_without_a_layer_is_refused(plain: Trained, tmp_path: Path) -> None:
    odd = copied(plain, tmp_path / "a", lambda tensors: tensors.update({"base_model.model.extra": torch.ones(2)}))
    with pytest.raises(ConfigError, match="it holds extra, which Qwen3ForCausalLM does not have"):
        merged(odd, tmp_path / "merged")


def test_4_bits_are_refused_for_an_adapter_that_was_trained_without(plain: Trained, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was trained on a base that is not in 4 bits"):
        merged(plain, tmp_path / "merged", "--ds.load_in_4bit")


def test_an_output_folder_with_files_is_refused(plain: Trained, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"merge\.output: .* is not empty"):
        merged(plain, tmp_path)


def test_an_invalid_base_is_refused_with_its_setting(plain: Trained, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"merge\.model_name_or_path: .* is not a model that can be read"):
        merged(plain, tmp_path / "merged", "--merge.model_name_or_path", str(tmp_path))
    with pytest.raises(ConfigError, match=r"merge\.model_name_or_path: .* holds an adapter and no model"):
        merged(plain, tmp_path / "merged", "--merge.model_name_or_path", str(plain.adapter))


def test_a_folder_without_an_adapter_is_refused(plain: Trained, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"merge\.adapter: there is no adapter in"):
        merged(replace(plain, adapter=plain.base), tmp_path / "merged")


def test_for_the_folder_of_a_run_the_error_names_its_adapter(plain: Trained, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "adapter").symlink_to(plain.adapter)
    with pytest.raises(
        ConfigError, match=rf"^merge\.adapter: {tmp_path}/run is the folder of a run: its adapter is in "
    ):
        merged(replace(plain, adapter=tmp_path / "run"), tmp_path / "merged")
