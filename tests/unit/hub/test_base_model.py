from pathlib import Path

import pytest

from vlmrl.hub.base_model import BaseModel, read_base, read_metadata

CARD = """---
license: other
license_name: qwen-research
license_link: https://example.org/LICENSE
base_model: Qwen/Qwen2.5-VL-3B
tags: [{tag}]
---
# A model
"""


def test_a_model_of_the_hub_that_was_not_downloaded_has_its_name_only() -> None:
    assert read_base("owner/never-downloaded") == BaseModel("owner/never-downloaded", "owner/never-downloaded", {})


def test_the_licence_comes_from_the_card_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD.format(tag="multimodal"))
    base = read_base(str(tmp_path))
    assert base.license == {
        "license": "other",
        "license_name": "qwen-research",
        "license_link": "https://example.org/LICENSE",
    }
    assert base.hub_id is None, "a copy from elsewhere names the base of its own base"
    assert str(tmp_path.parent) not in base.name


def test_the_result_of_another_run_hands_on_the_model_that_it_began_with(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD.format(tag="vlmrl"))
    assert read_base(str(tmp_path)).hub_id == "Qwen/Qwen2.5-VL-3B"


def test_a_card_among_the_downloads_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (tmp_path / "models--owner--model" / "refs").mkdir()
    (tmp_path / "models--owner--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert read_base("owner/model") == BaseModel("owner/model", "owner/model", {"license": "apache-2.0"})


@pytest.mark.parametrize(
    "text", ["no metadata", "---\n[1, 2]\n---\n", "---\na: [\n---\n", "---\nlicense: {x: 1}\n---\n", ""]
)
def test_odd_cards_are_as_good_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    read_metadata(tmp_path / "README.md")
    assert read_base(str(tmp_path)).license == {}
