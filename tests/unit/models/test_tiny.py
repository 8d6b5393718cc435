"""Tiny models have the format of their families' real checkpoints."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig

from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.models.tiny_vision import VISION_FAMILIES

OTHERS = tuple(VISION_FAMILIES)
FAMILIES: tuple[tiny.Family, ...] = tuple(family for family in get_args(tiny.Family) if family not in OTHERS)
VISION: tuple[tiny.Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé 12?"}]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.build(family, root / family, size="micro") for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_keeps_every_byte_and_every_special_token(built: dict[str, Path], family: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(built[family])
    ids = tokenizer("<|im_start|>é 1\n<|im_end|>").input_ids
    assert ids == [257, 0xC3, 0xA9, 0x20, 0x31, 0x0A, 258]
    assert tokenizer.decode(ids) == "<|im_start|>é 1\n<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "é 1\n"
    assert [tokenizer.convert_tokens_to_ids(token) for token in tiny.SPECIAL_TOKENS] == list(range(256, 270))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chat_template_marks_turns(built: dict[str, Path], family: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(built[family])
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHé 12?<|im_end|>\n"
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == turns
    opened = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert opened == turns + "<|im_start|>assistant\n"


@pytest.mark.parametrize("family", VISION)
def test_images_and_text_are_in_the_order_of_their_parts(built: dict[str, Path], family: str) -> None:
    processor: Any = AutoProcessor.from_pretrained(built[family])
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    rendered = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert rendered == f"<|im_start|>user\na{image}b{image}<|im_end|>\n"
    assert processor.tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False) == rendered


@pytest.mark.parametrize(
    ("family", "side"), [("qwen2_5_vl", 112), ("qwen3_vl", 128), ("qwen3_5", 128), ("qwen2_vl", 112)]
)
def test_an_image_of_the_default_size_is_sixteen_tokens(built: dict[str, Path], family: str, side: int) -> None:
    processor: Any = AutoProcessor.from_pretrained(built[family])
    inputs = processor(text=["<|image_pad|>"], images=[torch.zeros(3, side, side)], return_tensors="pt")
    assert (inputs["input_ids"] == 268).sum() == 16


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_tokens_are_those_of_the_family(built: dict[str, Path], family: str) -> None:
    assert GenerationConfig.from_pretrained(built[family]).eos_token_id == [258, 256]
    assert AutoConfig.from_pretrained(built[family]).get_text_config().eos_token_id == 258


def test_equal_seeds_give_equal_weights_and_do_not_move_the_generator(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    weights = [
        load_file(tiny.build("qwen3", tmp_path / name, seed=seed, size="micro") / "model.safetensors")
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_tied_models_store_one_embedding(tmp_path: Path, family: tiny.Family) -> None:
    stored = load_file(tiny.build(family, tmp_path, tied=True, size="micro") / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings


def test_the_default_size_is_tiny(tmp_path: Path) -> None:
    stored = load_file(tiny.build("qwen2_5_vl", tmp_path) / "model.safetensors")
    assert 1.5e6 < sum(weight.numel() for weight in stored.values()) < 1.8e6


def test_an_unknown_family_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tiny model of family 'gpt'; there are: qwen2_vl"):
        tiny.build("gpt", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no tiny model of size 'huge'; there are: micro"):
        tiny.build("qwen3", tmp_path, size="huge")  # type: ignore[arg-type]


def test_a_file_at_the_path_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ConfigError, match="model is a file"):
        tiny.build("qwen3", tmp_path / "model", size="micro")


def test_the_command_line_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "model"
    assert tiny.main(["--family", "llama", "--out", str(out), "--size", "micro"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert (out / "model.safetensors").exists()
