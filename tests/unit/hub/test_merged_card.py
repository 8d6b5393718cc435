from pathlib import Path

from huggingface_hub import ModelCard

from vlmrl.hub.merged_card import write_merged_card

ADAPTER = """---
base_model: owner/base
datasets: [owner/rows]
library_name: peft
pipeline_tag: text-generation
tags: [vlmrl, sft, lora]
---

# run

## Results

good

## Use

PeftModel

## How it was verified

so

## Data

rows
"""


def test_what_the_card_of_the_adapter_says_of_its_run_is_kept(tmp_path: Path) -> None:
    adapter, base, output = tmp_path / "adapter", tmp_path / "base", tmp_path / "merged"
    for folder in (adapter, base, output):
        folder.mkdir()
    (adapter / "README.md").write_text(ADAPTER)
    (adapter / "curves.png").write_bytes(b"png")
    (base / "README.md").write_text("---\nlicense: mit\ntags: [vlmrl]\nbase_model: owner/base\n---\n")
    write_merged_card(adapter, str(base), output)
    card = ModelCard((output / "README.md").read_text())
    assert card.data.to_dict() == {
        "base_model": "owner/base",
        "datasets": ["owner/rows"],
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["vlmrl", "sft", "lora"],
    }
    assert " ".join(card.text.split()) == (
        "# merged The adapter `…/adapter`, merged into `…/base` by `vlmrl merge`. "
        "## Results good ## How it was verified so ## Data rows"
    )
    assert (output / "curves.png").exists()


def test_an_adapter_of_another_program_has_no_card_of_a_run(tmp_path: Path) -> None:
    for name in ("adapter", "merged"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "README.md").write_text("# An adapter\n\n## Results\n\nwho knows\n")
    write_merged_card(tmp_path / "adapter", "owner/base", tmp_path / "merged")
    text = (tmp_path / "merged" / "README.md").read_text()
    assert "base_model: owner/base" in text
    assert "who knows" not in text
