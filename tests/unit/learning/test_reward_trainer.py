"""The padding token of saved reward models."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmrl.learning.reward_trainer import padding_token
from vlmrl.models.tiny import build


@pytest.mark.parametrize(
    ("own", "expected"), [("<|endoftext|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"), (None, "<|endoftext|>")]
)
def test_a_reward_model_is_padded_with_a_token_that_ends_no_response(
    tmp_path: Path, own: str | None, expected: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build("qwen3", tmp_path / "tiny"))
    tokenizer.pad_token = own
    assert tokenizer.eos_token == "<|im_end|>"
    assert padding_token(tokenizer) == expected


def test_without_another_special_token_there_is_no_padding() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", pad_token="</s>")
    assert padding_token(tokenizer) is None
