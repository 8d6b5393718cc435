"""Conversion of rows of Hub datasets. Loading the data itself needs the network."""

from PIL import Image

from vlmrl.datasets import clevr_count, geometry3k, gsm8k
from vlmrl.plugins import plugin_names

IMAGE = Image.new("RGB", (4, 4))


def test_geometry3k_rows() -> None:
    row = geometry3k.convert({"problem": " <image>Find x. ", "answer": 4, "images": [IMAGE]})
    assert row == {"input": "<image>Find x.", "label": "4", "images": [IMAGE], "family": "geometry3k"}


def test_clevr_labels_have_no_tags() -> None:
    row = clevr_count.convert({"problem": "How many?", "solution": "<answer> 3 </answer>", "image": IMAGE})
    assert row == {"input": "How many?", "label": "3", "images": [IMAGE], "family": "clevr_count"}
    assert clevr_count.convert({"problem": "q", "solution": " 5 ", "image": IMAGE})["label"] == "5"


def test_gsm8k_rows_keep_the_solution_and_box_the_answer() -> None:
    row = gsm8k.convert({"question": "How much? ", "answer": "1 + 999 = 1000\n#### 1,000"})
    assert row["label"] == "1000"
    assert row["input"] == "How much?"
    assert row["answer"] == "1 + 999 = 1000\n\\boxed{1000}"


def test_every_dataset_file_has_rows() -> None:
    generated = {"arithmetic", "visual_math", "visual_motion", "demonstrations", "episodes"}
    generated |= {"text_preferences", "visual_preferences"}
    assert set(plugin_names("datasets")) == generated | {"clevr_count", "geometry3k", "gsm8k", "image_folder", "jsonl"}
