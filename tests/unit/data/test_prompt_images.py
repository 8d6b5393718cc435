import base64
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from prompt_streams import IMAGE, rows, stream

from vlmrl.config.data import Columns
from vlmrl.data.media import InlineMedia
from vlmrl.data.prompts import PromptStream
from vlmrl.data.rows import Rows, load_rows
from vlmrl.errors import DataError
from vlmrl.plugins import Processor
from vlmrl.types import Media


def test_rows_may_have_any_number_of_images(vlm: Processor) -> None:
    content = [
        {"input": "a", "images": None},
        {"input": "b <image>", "images": [IMAGE]},
        {"input": "c", "images": [IMAGE, Image.new("RGB", (28, 84))]},
    ]
    prompts = stream(rows(content), processor=vlm).all_prompts(10)
    assert [len(prompt.media) for prompt in prompts] == [0, 1, 2]
    images = [int(vlm.token_types(prompt.tokens).sum()) for prompt in prompts]
    assert images == [0, 4, 4 + 3]


def test_rows_with_images_are_dropped_for_a_text_model(text_model: Processor) -> None:
    one = stream(
        rows([{"input": "a", "images": [IMAGE]}, {"input": "b", "images": []}]),
        processor=text_model,
        max_dropped_fraction=1.0,
    )
    assert len(one.draw(2)) == 2
    assert one.dropped == {"model takes no images": 1}


def test_an_image_column_of_another_name_must_be_configured(vlm: Processor) -> None:
    content = [{"input": "a", "image": IMAGE}]
    with pytest.raises(DataError, match=r"has images in column 'image'.*set data.image_key to image"):
        stream(rows(content), processor=vlm)
    assert stream(rows(content), processor=vlm, image_key="image").draw(1)[0].media


def test_images_inside_messages_are_read(vlm: Processor, tmp_path: Path) -> None:
    IMAGE.save(tmp_path / "a.png")
    encoded = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    asked = {"type": "text", "text": "Which?"}
    inline = [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": encoded}},
        {"type": "image", "image": IMAGE},
    ]
    content: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": [*inline, asked]}], "label": "1", "images": None},
        {"prompt": [{"from": "human", "value": "<image> Which?"}], "label": "2", "images": [IMAGE]},
        {"prompt": [{"role": "user", "content": [*inline, asked]}], "label": "3", "images": [IMAGE]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "gone.png"}, asked]}], "label": "4"},
    ]
    one = stream(replace(rows(content), root=tmp_path), processor=vlm, max_dropped_fraction=0.5)
    prompts = one.all_prompts(4)
    assert [len(prompt.media) for prompt in prompts] == [3, 1]
    assert len({media.hash for prompt in prompts for media in prompt.media}) == 1
    assert "<|vision_end|><|vision_start|><|image_pad|><|vision_end|>Which?" in prompts[0].text
    assert "a.png" not in str(prompts[0].metadata)
    assert one.dropped == {"question and images do not fit": 1, "image unusable": 1}


def test_equal_images_of_a_draw_are_shared_once(vlm: Processor) -> None:
    calls: list[str] = []

    def share(media: InlineMedia) -> Media:
        calls.append(media.hash)
        return media

    content = [{"input": str(i), "images": [IMAGE, Image.new("RGB", (28, 28), "blue")]} for i in range(5)]
    one = PromptStream([rows(content)], probs=None, processor=vlm, columns=Columns(), seed=0, share=share)
    prompts = one.draw(5)
    assert len(calls) == len(set(calls)) == 2
    assert len({id(prompt.media[0]) for prompt in prompts}) == 1


def test_relative_paths_start_at_the_image_root_or_the_file(vlm: Processor, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    IMAGE.save(tmp_path / "pictures" / "a.png")
    file = tmp_path / "mine.jsonl"
    file.write_text('{"input": "q", "images": ["pictures/a.png"]}\n')
    loaded = load_rows(str(file), split="train", max_samples=9, seed=0)
    assert stream(loaded, processor=vlm).draw(1)[0].media
    with pytest.raises(DataError, match="does not exist"):
        stream(loaded, processor=vlm, image_root=str(tmp_path / "pictures")).draw(1)


def test_rows_with_forbidden_files_or_addresses_are_dropped(
    vlm: Processor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine").mkdir()
    IMAGE.save(tmp_path / "mine" / "a.png")
    IMAGE.save(tmp_path / "b.png")
    (tmp_path / "mine" / "link.png").symlink_to("../b.png")
    sources = ["a.png", "../b.png", f"file://{tmp_path}/b.png", "link.png", "http://169.254.169.254/x.png"]
    content = [{"input": source, "images": [source]} for source in sources]
    loaded = Rows(name="mine", rows=content, columns=("input", "images"), root=tmp_path / "mine")
    strict = stream(loaded, processor=vlm, max_dropped_fraction=1.0)
    with caplog.at_level(logging.WARNING):
        assert {prompt.source for prompt in strict.draw(5)} == {"mine:0"}
    assert strict.dropped == {"image unusable": 4}
    assert caplog.text.count("is outside the dataset's folder") == 3
    assert caplog.text.count("http://169.254.169.254/x.png is on the web") == 1
    trusting = stream(loaded, processor=vlm, max_dropped_fraction=1.0, image_roots=[str(tmp_path)])
    assert {prompt.source for prompt in trusting.draw(8)} == {f"mine:{row}" for row in range(4)}
    online = stream(loaded, processor=vlm, max_dropped_fraction=1.0, allow_image_urls=True)
    online.draw(5)
    assert "host 169.254.169.254 is at 169.254.169.254, which is not public" in caplog.text


def test_further_image_folders_of_a_dataset_are_allowed(vlm: Processor, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    IMAGE.save(tmp_path / "cache" / "a.png")
    loaded = Rows(
        name="hub",
        rows=[{"input": "q", "images": {"bytes": None, "path": str(tmp_path / "cache" / "a.png")}}],
        columns=("input", "images"),
        root=tmp_path / "repository",
        image_folders=(tmp_path / "cache",),
    )
    assert stream(loaded, processor=vlm).draw(1)[0].media


def test_the_total_pixels_of_a_row_are_limited(vlm: Processor, caplog: pytest.LogCaptureFixture) -> None:
    content = [{"input": "two", "images": [IMAGE] * 2}, {"input": "three", "images": [IMAGE] * 3}]
    with caplog.at_level(logging.WARNING):
        prompts = stream(rows(content), processor=vlm, max_dropped_fraction=0.5, max_row_pixels=2 * 56 * 56).draw(2)
    assert {prompt.source for prompt in prompts} == {"mine:0"}
    assert "the images have more than 6272 pixels in total: raise data.max_row_pixels" in caplog.text


def test_threads_do_not_mix_up_images(vlm: Processor) -> None:
    content = [{"input": str(i), "images": [Image.new("RGB", (56, 56), (i, i, i))]} for i in range(40)]
    for prompt in stream(rows(content), processor=vlm).draw(40):
        assert prompt.media[0].fetch()[0, 0, 0] == int(prompt.source.partition(":")[2])
