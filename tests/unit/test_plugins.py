from pathlib import Path

import pytest

from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.plugins import located, plugin, plugin_names, processor


def test_a_name_finds_its_file() -> None:
    assert plugin("datasets", "arithmetic").__name__ == "vlmrl.datasets.arithmetic"
    assert plugin_names("processors") == ["gemma3", "glm4v", "internvl", "qwen_vl", "smolvlm", "text", "vision"]


def test_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no file processors/gpt.py; there are: gemma3, glm4v, internvl, qwen_vl, smolvlm, text, vision",
    ):
        plugin("processors", "gpt")


def test_a_model_folder_that_is_not_there_or_holds_no_model_is_one_line(tmp_path: Path) -> None:
    for path, message in [("/no/such/model", "there is no folder /no/such/model"), (str(tmp_path), "not a model")]:
        with pytest.raises(ConfigError, match=message) as caught:
            processor(path, min_pixels=784, max_pixels=784)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="nobody/nothing is not a model that can be read"):
        processor("nobody/nothing", min_pixels=784, max_pixels=784)


def test_an_adapter_or_run_folder_instead_of_a_model_is_reported_with_a_fix(tmp_path: Path) -> None:
    adapter, full, trained = tmp_path / "lora", tmp_path / "run", tmp_path / "run_lora"
    for file in (
        adapter / "adapter_config.json",
        full / "model" / "config.json",
        trained / "adapter/adapter_config.json",
    ):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    for folder, expected_message in [
        (adapter, f"{adapter} holds an adapter and no model: .* vlmrl merge --merge.adapter {adapter} --merge.output"),
        (full, f"is the folder of a run: its model is in {full}/model$"),
        (trained, f"is the folder of a run, which trained an adapter: .* --merge.adapter {trained}/adapter "),
    ]:
        with pytest.raises(ConfigError, match=f"^actor.model_name_or_path: .*{expected_message}") as caught:
            processor(str(folder), min_pixels=784, max_pixels=784)
        assert "\n" not in str(caught.value)
        with pytest.raises(ConfigError, match=r"^ref\.model_name_or_path: "):
            located(str(folder), flag="ref.model_name_or_path")


def test_a_model_without_a_tokenizer_is_reported(tmp_path: Path) -> None:
    folder = tiny.build("qwen3", tmp_path / "micro", size="micro")
    assert processor(str(folder), min_pixels=784, max_pixels=784).tokenizer.chat_template is not None
    # Transformers makes an empty tokenizer of what is left, which knows no chat template either.
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=rf"^actor.model_name_or_path: there is no tokenizer in {folder}: copy"):
        processor(str(folder), min_pixels=784, max_pixels=784)
