from pathlib import Path

import pytest

from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.plugins import located, name_or_function, plugin, plugin_names, processor, user_function


def test_a_name_finds_its_file() -> None:
    assert plugin("datasets", "arithmetic").__name__ == "vlmrl.datasets.arithmetic"
    assert plugin_names("processors") == ["qwen_vl", "text"]


def test_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"no file processors/gpt.py; there are: qwen_vl, text"):
        plugin("processors", "gpt")


def test_a_users_function_is_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    assert user_function(f"{tmp_path}/mine.py:double", "reward.remote_url")(21) == 42


def test_a_setting_is_a_name_or_a_users_function_that_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("COUNT = []\ndef count():\n    COUNT.append(1)\n    return len(COUNT)\n")
    assert name_or_function("rloo", "algo.advantage.estimator") == "rloo"
    for expected in (1, 2):
        found = name_or_function(f"{tmp_path}/mine.py:count", "algo.advantage.estimator")
        assert callable(found)
        assert found() == expected


def test_a_setting_whose_file_is_mended_loads_then(tmp_path: Path) -> None:
    spec = f"{tmp_path}/mine.py:f"
    with pytest.raises(ConfigError, match=r"^algo.advantage.estimator: there is no file"):
        name_or_function(spec, "algo.advantage.estimator")
    (tmp_path / "mine.py").write_text("def f(rewards):\n    return rewards\n")
    assert callable(name_or_function(spec, "algo.advantage.estimator"))


@pytest.mark.parametrize(
    ("content", "spec", "message"),
    [
        ("", "mine.py", "should look like path/to/file.py:function"),
        ("", "mine.txt:f", "should look like"),
        ("", "other.py:f", "there is no file .*other.py"),
        ("def g(): ...\ndef _h(): ...\nF = 3\n", "mine.py:f", "has no function f; it has: g$"),
        ("f = 3\n", "mine.py:f", "has no function f; it has: none"),
        (
            "import no_such_module\n",
            "mine.py:f",
            "does not import: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("def f(:\n", "mine.py:f", "does not import: SyntaxError"),
        ("raise SystemExit(3)\n", "mine.py:f", "does not import: SystemExit"),
    ],
)
def test_a_users_file_that_cannot_be_used_is_one_line(content: str, spec: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=f"^reward.remote_url: .*{message}") as caught:
        user_function(f"{tmp_path}/{spec}", "reward.remote_url")
    assert "\n" not in str(caught.value)


def test_a_model_folder_that_is_not_there_or_holds_no_model_is_one_line(tmp_path: Path) -> None:
    for path, message in [("/no/such/model", "there is no folder /no/such/model"), (str(tmp_path), "not a model")]:
        with pytest.raises(ConfigError, match=message) as caught:
            processor(path, min_pixels=784, max_pixels=784)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="nobody/nothing is not a model that can be read"):
        processor("nobody/nothing", min_pixels=784, max_pixels=784)


def test_a_folder_with_an_adapter_or_a_run_instead_of_a_model_says_what_to_do(tmp_path: Path) -> None:
    adapter, full, trained = tmp_path / "lora", tmp_path / "run", tmp_path / "run_lora"
    for file in (
        adapter / "adapter_config.json",
        full / "model" / "config.json",
        trained / "adapter/adapter_config.json",
    ):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    for folder, said in [
        (adapter, f"{adapter} holds an adapter and no model: .* vlmrl merge --merge.adapter {adapter} --merge.output"),
        (full, f"is the folder of a run: its model is in {full}/model$"),
        (trained, f"is the folder of a run, which trained an adapter: .* --merge.adapter {trained}/adapter "),
    ]:
        with pytest.raises(ConfigError, match=f"^actor.model_name_or_path: .*{said}") as caught:
            processor(str(folder), min_pixels=784, max_pixels=784)
        assert "\n" not in str(caught.value)
        with pytest.raises(ConfigError, match=r"^ref\.model_name_or_path: "):
            located(str(folder), flag="ref.model_name_or_path")


def test_a_model_without_a_tokenizer_is_told_so(tmp_path: Path) -> None:
    folder = tiny.build("qwen3", tmp_path / "micro", size="micro")
    assert processor(str(folder), min_pixels=784, max_pixels=784).tokenizer.chat_template is not None
    # Transformers makes an empty tokenizer of what is left, which knows no chat template either.
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=rf"^actor.model_name_or_path: there is no tokenizer in {folder}: copy"):
        processor(str(folder), min_pixels=784, max_pixels=784)
