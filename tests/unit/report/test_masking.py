from __future__ import annotations

import json

import pytest

from vlmrl.report.masking import mask_urls, mask_values


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:pa%20ss@host:80/a?b=1", "https://•••@host:80/a?b=1"),
        ("http://h/score?api_key=abc&n=2", "http://h/score?api_key=•••&n=2"),
        ("s3://b/x?X-Amz-Signature=ff00&token=t", "s3://b/x?X-Amz-Signature=•••&token=•••"),
        ("visual_math?families=count&size=8", "visual_math?families=count&size=8"),
        ("me@example.org", "me@example.org"),
    ],
)
def test_users_and_keys_in_urls_are_masked(text: str, masked: str) -> None:
    assert mask_urls(text) == masked


def test_values_of_secret_variables_are_masked_wherever_they_are() -> None:
    environment = {
        "WANDB_API_KEY": 'abc"def/123',
        "HF_TOKEN": "hf_ABCDEFGH",
        "KEYBOARD": "us-layout-1",
        "MY_KEY": "short",
    }
    page = json.dumps({"a": 'x abc"def/123 y', "b": "hf_ABCDEFGHIJ", "c": "us-layout-1 short"})
    assert json.loads(mask_values(page, environment)) == {"a": "x ••• y", "b": "•••IJ", "c": "us-layout-1 short"}
