import base64
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from vlmrl.config.data import Columns
from vlmrl.data.image_source import ImageAccess
from vlmrl.data.media import (
    Blank,
    ImageLimits,
    InlineMedia,
    Noise,
    Resized,
    make_media,
    open_images,
    resize,
    target_size,
)
from vlmrl.errors import DataError
from vlmrl.plugins import Processor

BOUND = 1_000_000


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def opened(source: Any, root: Path | None = None, bound: int = BOUND) -> Image.Image:
    limits = ImageLimits.of(Columns())._replace(image_pixels=bound)
    (image,) = open_images([source], limits=limits, access=ImageAccess.of(root, Columns()))
    return image


RED = Image.new("RGB", (30, 20), (255, 0, 0))


@pytest.mark.parametrize(
    "source",
    [
        RED,
        np.asarray(RED),
        encoded(RED),
        bytearray(encoded(RED)),
        base64.b64encode(encoded(RED)).decode(),
        base64.urlsafe_b64encode(encoded(RED)).decode(),
        base64.encodebytes(encoded(RED) + bytes(300)).decode(),
        "data:image/png;base64," + base64.b64encode(encoded(RED)).decode(),
        {"bytes": encoded(RED), "path": None},
        {"bytes": encoded(RED), "path": "gone.png"},
        {"bytes": None, "path": "red.png"},
        "red.png",
        Path("red.png"),
    ],
    ids=lambda source: type(source).__name__,
)
def test_every_form_of_an_image_gives_the_same_pixels(source: Any, tmp_path: Path) -> None:
    RED.save(tmp_path / "red.png")
    image = opened(source, tmp_path)
    assert image.mode == "RGB"
    assert image.size == (30, 20)
    assert set(image.get_flattened_data()) == {(255, 0, 0)}


def test_transparency_is_composited_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert list(opened(encoded(image)).get_flattened_data()) == [(255, 0, 0), (255, 255, 255)]


def test_half_transparent_grey_is_half_white() -> None:
    image = Image.new("LA", (1, 1), (0, 51))  # 51 / 255 = 20 % black
    assert opened(encoded(image)).getpixel((0, 0)) == (204, 204, 204)


def test_a_palette_becomes_its_colours_and_its_transparent_entry_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    assert list(opened(encoded(image)).get_flattened_data()) == [(10, 20, 30), (40, 50, 60)]
    assert list(opened(encoded(image, transparency=1)).get_flattened_data()) == [(10, 20, 30), (255, 255, 255)]


def test_black_and_white_cmyk_and_grey_become_rgb() -> None:
    for mode, colour in (("1", 1), ("L", 255), ("CMYK", (0, 0, 0, 0))):
        image = Image.new(mode, (2, 2), colour)
        kind = "TIFF" if mode == "CMYK" else "PNG"
        assert opened(encoded(image, kind)).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.array([[0, 257 * 100, 65535]], dtype=np.uint16)
    assert [pixel[0] for pixel in opened(encoded(Image.fromarray(values))).get_flattened_data()] == [0, 100, 255]
    deep = Image.fromarray(values.astype(np.int32))
    assert [pixel[0] for pixel in opened(encoded(deep, "TIFF")).get_flattened_data()] == [0, 100, 255]
    shares = Image.fromarray(np.array([[0.0, 0.2, 1.0]], dtype=np.float32))
    assert [pixel[0] for pixel in opened(encoded(shares, "TIFF")).get_flattened_data()] == [0, 51, 255]


def test_exif_rotation_is_applied() -> None:
    image = Image.new("RGB", (4, 2))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert opened(encoded(image, "JPEG", exif=exif)).size == (2, 4)


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert opened(content).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.png", "missing.png does not exist"),
        ("folder", "cannot be read"),
        ("a\0b.png", "cannot be read"),
        ("notes.txt", r"notes.txt is not a readable image \(5 bytes\): supported are PNG, JPEG, "),
        (b"", "is not a readable image"),
        (encoded(Image.effect_noise((64, 64), 90))[:1500], "damaged or truncated"),
        (encoded(Image.effect_noise((64, 64), 90), "JPEG")[:-600], "damaged or truncated"),
        ("data:image/png;base64,!!!", "not valid base64"),
        ({"bytes": None, "path": None}, "neither bytes nor path"),
        ({}, "neither bytes nor path, only: nothing"),
        (17, "int is not an image"),
        (np.zeros((2, 2, 3)), "float64"),
        ("http://127.0.0.1:1/x.png", "image http://127.0.0.1:1/x.png is on the web: .* set data.allow_image_urls"),
    ],
)
def test_a_bad_image_is_reported_in_one_line(source: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=message) as caught:
        opened(source, tmp_path)
    assert "\n" not in str(caught.value)


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    content = encoded(Image.new("1", (40_000, 30_000)))  # 1.2 gigapixels in a few kilobytes
    assert len(content) < 400_000
    with pytest.raises(DataError, match="decompression bomb"):
        opened(content)
    with pytest.raises(DataError, match="more than 599 pixels"):
        opened(RED, bound=599)
    assert opened(RED, bound=600).size == (30, 20)


def test_a_raised_limit_is_not_overruled_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert opened(encoded(RED), bound=600).size == (30, 20)


@pytest.mark.parametrize(
    ("factor", "min_pixels", "max_pixels"),
    [(28, 3136, 1003520), (32, 3136, 1003520), (28, 12544, 12544), (32, 4096, 4096), (28, 50_000, 60_000)],
)
def test_resizing_a_second_time_changes_nothing(factor: int, min_pixels: int, max_pixels: int) -> None:
    for size in [(1, 1), (20, 3000), (3000, 15), (112, 200), (6000, 30), (641, 480), (27, 29), (5000, 4000)]:
        width, height = target_size(size, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
        assert min_pixels <= width * height <= max_pixels
        # What the image processors of Transformers and vLLM do with it:
        assert smart_resize(height, width, factor, min_pixels, max_pixels) == (height, width)


def test_target_sizes_worked_by_hand() -> None:
    bounds = {"factor": 28, "min_pixels": 56 * 56, "max_pixels": 112 * 112}
    assert target_size((112, 112), **bounds) == (112, 112)
    assert target_size((1, 1), **bounds) == (56, 56)
    assert target_size((100, 60), **bounds) == (112, 56)  # 3.57 and 2.14 patches
    assert target_size((1120, 560), **bounds) == (140, 56)  # scaled to 158x79, then rounded down to whole patches


def test_bounds_close_together_give_the_nearest_shape() -> None:
    # 16 patches in any shape: 3 : 1 is nearest to 8x2, 1.1 : 1 to 4x4.
    assert target_size((300, 100), factor=28, min_pixels=112 * 112, max_pixels=112 * 112) == (8 * 28, 2 * 28)
    assert target_size((110, 100), factor=28, min_pixels=112 * 112, max_pixels=112 * 112) == (4 * 28, 4 * 28)


def test_an_aspect_ratio_above_200_is_refused() -> None:
    assert target_size((2000, 10), factor=28, min_pixels=784, max_pixels=10**6)[1] == 28
    with pytest.raises(DataError, match="2001x10 pixels is too elongated"):
        target_size((2001, 10), factor=28, min_pixels=784, max_pixels=10**6)


def test_resized_pixels_are_height_width_rgb() -> None:
    pixels = resize(Image.new("RGB", (60, 80), (1, 2, 3)), (56, 84), Image.Resampling.BICUBIC)
    assert pixels.shape == (84, 56, 3)
    assert pixels.dtype == np.uint8
    assert pixels.reshape(-1, 3).tolist() == [[1, 2, 3]] * (84 * 56)


def made(source: Any, processor: Processor) -> InlineMedia:
    return make_media(source, processor=processor, columns=Columns())


def test_the_hash_covers_pixels_and_resize_settings(vlm: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.effect_noise((56, 56), 50)
    first = made(image, vlm)
    assert first.hash == made(encoded(image), vlm).hash
    assert first.size == (56, 56)
    assert first.fetch().shape == (56, 56, 3)
    changed = image.copy()
    changed.putpixel((0, 0), 255 - int(image.getpixel((0, 0))))  # type: ignore[arg-type]
    assert made(changed, vlm).hash != first.hash
    monkeypatch.setattr(vlm, "resize_settings", "something else")
    assert made(image, vlm).hash != first.hash


def test_equal_bytes_in_another_shape_have_another_hash(vlm: Processor) -> None:
    wide, high = (made(Image.new("RGB", size, "red"), vlm) for size in ((56, 28), (28, 56)))
    assert wide.pixels.nbytes == high.pixels.nbytes
    assert wide.hash != high.hash


def test_blank_noise_and_resized_images_have_the_given_size_and_survive_pickling() -> None:
    half = np.zeros((2, 4, 3), dtype=np.uint8)
    half[:, 2:] = 200
    source = InlineMedia("half", (4, 2), half)
    for media in (Blank("blank", (8, 6)), Noise("noise", (8, 6)), Resized("other", (8, 6), source)):
        pixels = media.fetch()
        assert (pixels.shape, pixels.dtype) == ((6, 8, 3), np.uint8)
        again = pickle.loads(pickle.dumps(media))
        assert (again.hash, again.size) == (media.hash, (8, 6))
        assert np.array_equal(again.fetch(), pixels)
    assert set(Blank("blank", (8, 6)).fetch().flat) == {127}
    assert Noise("noise", (8, 6)).fetch().std() > 50
    stretched = Resized("other", (8, 6), source).fetch()
    assert stretched[:, 0].max() == 0
    assert stretched[:, -1].min() == 200
