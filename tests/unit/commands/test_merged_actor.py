"""The model that a run samples from when its actor has an adapter."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from vlmrl.commands.generate import settings_of
from vlmrl.commands.merged_actor import check_adapter, with_merged_actor
from vlmrl.config.actor import Model
from vlmrl.config.load import load
from vlmrl.config.lora import Lora
from vlmrl.config.verbs import EvalConfig, GenerateConfig
from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.models.adapter_files import Base, base_fingerprint, write_adapter
from vlmrl.models.adapter_plan import PREFIX, plan_adapter
from vlmrl.models.adapters import adapter_tensors, inject_adapter
from vlmrl.models.load import load_model
from vlmrl.models.value_head import HEAD
from vlmrl.observe.run_folder import RunFolder
from vlmrl.plugins import processor

WORD = torch.arange(5, 40)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "base", size="micro"))


def read(path: str) -> PreTrainedModel:
    return load_model(path, dtype=torch.float32, attn_implementation=None)


def logits(net: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits_of_word: torch.Tensor = net.eval()(input_ids=WORD).logits
    return logits_of_word


def write(base: str, folder: Path, *, head: bool = False) -> torch.Tensor:
    """Write an adapter on all layers, vision tower included, and return the logits with it."""
    lora = Lora(rank=4, target_modules=("all",))
    plan = plan_adapter(Model(model_name_or_path=base), lora, processor(base, min_pixels=3136, max_pixels=100_000))
    assert plan is not None
    net = read(base)
    torch.manual_seed(3)
    inject_adapter(net, plan)
    with torch.no_grad():
        for _, parameter in adapter_tensors(net):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    tensors = [*adapter_tensors(net), *([(f"{PREFIX}{HEAD}", torch.ones(1, 4))] if head else [])]
    record = Base(path=base, fingerprint=base_fingerprint(base), is_four_bit=False)
    write_adapter(folder, plan, tensors, base=record)
    return logits(net)


def evaluation(base: str, adapter: Path) -> EvalConfig:
    words = ["--actor.model_name_or_path", base, "--actor.adapter_name_or_path", str(adapter), "--eval.dataset", "d"]
    return load(EvalConfig, words)


def test_engines_load_the_model_with_its_adapter_which_is_gone_after_the_run(base: str, tmp_path: Path) -> None:
    with_adapter = write(base, tmp_path / "adapter")
    folder, lines = RunFolder(tmp_path / "out"), list[str]()
    folder.merged.mkdir(parents=True)
    (folder.merged / "left by a kill").touch()
    config = evaluation(base, tmp_path / "adapter")
    check_adapter(config)
    with ExitStack() as stack:
        merged = with_merged_actor(config, folder, stack, lines.append)
        assert (merged.actor.adapter_name_or_path, merged.eval) == (None, config.eval)
        assert not (folder.merged / "left by a kill").exists()
        torch.testing.assert_close(logits(read(merged.actor.model_name_or_path)), with_adapter, atol=1e-3, rtol=1e-3)
        processor(merged.actor.model_name_or_path, min_pixels=3136, max_pixels=100_000)
    assert not folder.merged.exists()
    assert len(lines) == 1


def test_without_an_adapter_the_settings_are_those_of_the_run(base: str, tmp_path: Path) -> None:
    config = load(EvalConfig, ["--actor.model_name_or_path", base, "--eval.dataset", "d"])
    check_adapter(config)
    with ExitStack() as stack:
        assert with_merged_actor(config, RunFolder(tmp_path), stack, print) is config


def test_adapters_of_other_models_and_of_reward_models_are_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.adapter_name_or_path: there is no adapter in .*/gone"):
        check_adapter(evaluation(base, tmp_path / "gone"))
    write(base, tmp_path / "adapter")
    other = str(tiny.build("qwen2_5_vl", tmp_path / "other", size="micro", seed=5))
    with pytest.raises(
        ConfigError, match=r"actor\.adapter_name_or_path: the adapter in .* was trained on other weights"
    ):
        check_adapter(evaluation(other, tmp_path / "adapter"))
    write(base, tmp_path / "scorer", head=True)
    with pytest.raises(ConfigError, match=r"scorer is the adapter of a reward model, which gives no responses"):
        check_adapter(evaluation(base, tmp_path / "scorer"))


def test_responses_depend_on_the_adapters_files(base: str, tmp_path: Path) -> None:
    def settings() -> dict[str, object]:
        words = ["--actor.model_name_or_path", base, "--data.prompt_dataset", "d"]
        return settings_of(load(GenerateConfig, [*words, "--actor.adapter_name_or_path", str(tmp_path / "adapter")]))

    write(base, tmp_path / "adapter")
    before = settings()
    assert before == settings()
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\1\1\1")
    after = settings()
    assert [name for name in after if after[name] != before[name]] == ["files of actor.adapter_name_or_path"]
