import os
from pathlib import Path

import pytest

from vlmrl.hub.privacy import public_value, without_secrets


@pytest.mark.parametrize(
    ("value", "public"),
    [
        ("/home/me/data/mine.jsonl?size=3", "…/mine.jsonl?size=3"),
        ("~/runs/sft/model", "…/model"),
        ("~somebody/model", "…/model"),
        ("/data/a b/x.jsonl,/data/y.jsonl:label_key=gold", "…/x.jsonl,…/y.jsonl:label_key=gold"),
        ("/rewards/mine.py:score", "…/mine.py:score"),
        ("http://me:pass@10.0.0.7:8000/score?key=abc", "http://…"),
        ("runs/sft/model", "runs/sft/model"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("visual_math?families=count+clock&size=8", "visual_math?families=count+clock&size=8"),
        ("flowers?question=left or right/up?", "flowers?question=left or right/up?"),
        (["/a/b", 0.5], ["…/b", 0.5]),
        ({"/a/b.py:f": 1.0}, {"…/b.py:f": 1.0}),
        (None, None),
    ],
)
def test_paths_and_urls_of_settings(value: object, public: object) -> None:
    assert public_value(value) == public


def test_values_of_secrets_and_folders_of_the_user_do_not_appear() -> None:
    environment = {"HF_TOKEN": "hf_0123456789", "MY_PASSWORD": "abc", "HOME_PAGE": "public page"}
    text = f"hf_0123456789 abc, public page {Path.cwd()}/runs {Path.home()}/x"
    cleaned = without_secrets(text, environment)
    assert cleaned.startswith("(hidden) abc, public page ")
    assert str(Path.cwd()) not in cleaned
    assert f"{os.sep}runs" in cleaned
    assert str(Path.home()) not in cleaned or Path.home() == Path("/")
