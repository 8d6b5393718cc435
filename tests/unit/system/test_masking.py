from __future__ import annotations

import json

import pytest

from vlmrl.system.masking import Mask, mask_urls


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:pa%20ss@host:80/a?b=1", "https://•••@host:80/a?b=1"),
        ("http://h/score?api_key=abc&n=2", "http://h/score?api_key=•••&n=2"),
        ("s3://b/x?X-Amz-Signature=ff00&token=t", "s3://b/x?X-Amz-Signature=•••&token=•••"),
        ("visual_math?families=count&size=8", "visual_math?families=count&size=8"),
        ("me@example.org", "me@example.org"),
        ("postgres://u:p@ss@h/db", "postgres://•••@h/db"),
        ("https://h/list?mail=a@b.c", "https://h/list?mail=a@b.c"),
        ("http://h/x?access=abc", "http://h/x?access=•••"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer •••"),
        ('{"Authorization": "Basic am9lOng="}', '{"Authorization": "Basic •••"}'),
        ("sent bearer 0123456789abcdef, failed", "sent bearer •••, failed"),
        ("the bearer of news", "the bearer of news"),
    ],
)
def test_users_and_keys_in_urls_are_masked(text: str, masked: str) -> None:
    assert mask_urls(text) == masked


ENVIRONMENT = {
    "WANDB_API_KEY": 'abc"def/123',
    "HF_TOKEN": "hf_ABCDEFGH",
    "KEYBOARD": "us-layout-1",
    "MY_KEY": "short",
}


def test_values_of_secret_variables_are_masked_wherever_they_are() -> None:
    mask = Mask(ENVIRONMENT)
    assert mask.text('x abc"def/123 y hf_ABCDEFGHIJ us-layout-1 short') == "x ••• y •••IJ us-layout-1 short"
    assert mask.text(json.dumps(['abc"def/123'])) == '["•••"]', "a setting is shown as JSON"
    assert Mask({}).text("as it is") == "as it is"


def test_names_and_numbers_stay() -> None:
    mask = Mask({"DB_PASSWORD": "262144", "MY_TOKEN": "images"})
    data = {"images": ["262144", 262144, {"b": "my images"}], "c": None}
    assert mask.strings(data) == {"images": ["•••", 262144, {"b": "my •••"}], "c": None}


def test_a_secret_of_several_tokens_is_masked() -> None:
    # The secret reaches from the middle of the second token to the middle of the fourth.
    tokens = ["is ", "hf", "_ABC", "DEFGH!", " so"]
    assert Mask(ENVIRONMENT).tokens(tokens) == ["is ", "•••", "", "", " so"]
    assert Mask(ENVIRONMENT).tokens(["none", "", "here"]) == ["none", "", "here"]
