from __future__ import annotations

import json
import time

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
        ("a bearer representatives elected", "a bearer representatives elected"),
        ("authorization: required", "authorization: required"),
        ("int a=0;signal=5; f(x)?key=3:4", "int a=0;signal=5; f(x)?key=3:4"),
        ("https://h/books?author=Dickens&design=red&sigma=0.5", "https://h/books?author=Dickens&design=red&sigma=0.5"),
        ("https://h/x?apiKey=a1&accessToken=b2&sig=c3", "https://h/x?apiKey=•••&accessToken=•••&sig=•••"),
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


def test_users_and_keys_in_urls_of_several_tokens_are_masked() -> None:
    tokens = ["at https", "://jo", "e:hunt", "er22", "@host/a", "?api", "_key=t0p", "5ecret", "&n=", "2"]
    masked = ["at https", "•••", "", "", "@host/a", "?api", "•••", "", "&n=", "2"]
    assert Mask({}).tokens(tokens) == masked, "a token in which something masked begins is masked as a whole"
    assert Mask({}).tokens(["x://a:b@c://d:", "e@f", " Bearer abc"]) == ["•••", "", " Bearer abc"]
    assert Mask({}).tokens([]) == []
    code = ["f(x)", "?key=", "3", ":4;signal", "=5 and ", "more"]
    assert Mask({}).tokens(code) == code, "of a URL only"


def test_a_secret_within_a_url_is_masked_with_it() -> None:
    tokens = ["http://h/x?token=", "a", "hf_ABC", "DEFGH", "b", "&c"]
    assert Mask(ENVIRONMENT).tokens(tokens) == ["http://h/x?token=", "•••", "", "", "", "&c"]


@pytest.mark.parametrize(
    "text", ["?" + "key" * 50_000, "://" + "a" * 200_000, "bearer" + " " * 200_000, "?key=" * 40_000]
)
def test_a_text_that_repeats_itself_takes_no_long_time(text: str) -> None:
    began = time.monotonic()
    mask_urls(text)
    Mask({}).tokens([*text])
    assert time.monotonic() - began < 5


def test_a_value_that_was_read_from_a_file_is_masked_without_its_line_break() -> None:
    assert Mask({"HF_TOKEN": "hf_ABCDEFGH\n"}).text("it is hf_ABCDEFGH.") == "it is •••."
