import io
import random
import struct
import subprocess
import sys
import threading
import time
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlmrl.data.decode import PixelBudget, num_scans, open_header, upright_rgb
from vlmrl.data.image_source import Encoded
from vlmrl.errors import DataError


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def opened(content: bytes, bound: int = 10**6) -> Image.Image:
    return upright_rgb(open_header(Encoded(content, "image x"), max_pixels=bound), "image x", keep_open=False)


def tiled_tiff(side: int, tile: int) -> bytes:
    """A grey picture of `side` x `side` pixels in one tile of `tile` x `tile`."""
    content = zlib.compress(bytes(tile * tile), 9)
    content += bytes(len(content) % 2)
    tags = {256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: len(content)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(content)) + content + struct.pack("<H", len(tags)) + entries + bytes(4)


GRADIENT = Image.linear_gradient("L").resize((70, 50))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_six_formats_are_read(kind: str) -> None:
    image = opened(encoded(GRADIENT.convert("RGB"), kind))
    assert (image.mode, image.size) == ("RGB", (70, 50))
    assert np.abs(np.asarray(image).astype(int) - np.asarray(GRADIENT)[..., None]).mean() < 4


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "PCX", "SGI", "JPEG2000", "AVIF", "EPS", "PDF", "DDS", "ICNS"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(
        DataError, match=r"^image x is not a readable image .*: supported are PNG, JPEG, WEBP, GIF, BMP, TIFF$"
    ):
        opened(encoded(GRADIENT.convert("RGB"), kind))


def test_only_the_first_frame_of_a_file_is_decoded() -> None:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "lime", "blue")]
    for kind, options in (("WEBP", {"lossless": True}), ("GIF", {}), ("TIFF", {}), ("PNG", {}), ("MPO", {})):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        red, green, blue = opened(content).getpixel((20, 15))  # type: ignore[misc]
        assert (red > 250, green < 5, blue < 5) == (True, True, True), kind
        # Damage after the first frame does not matter.
        if kind in ("GIF", "MPO"):
            assert opened(content[: len(content) * 2 // 3]).size == (40, 30)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "JPEG"), ("L", "PNG"), ("CMYK", "JPEG"), ("RGBA", "WEBP"), ("P", "TIFF")]
)
def test_exif_orientation_is_applied_in_every_mode(orientation: int, mode: str, kind: str) -> None:
    # A wide picture whose left half is black, as a rotated camera stores it.
    upright = Image.new("L", (64, 32), 255)
    upright.paste(0, (0, 0, 32, 32))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Transpose members that each orientation undoes
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = opened(encoded(stored.convert("RGB").convert(mode), kind, exif=exif)).convert("L")
    assert image.size == (64, 32)
    assert image.getpixel((8, 16)) < 60  # type: ignore[operator]
    assert image.getpixel((56, 16)) > 190  # type: ignore[operator]


def test_conversion_in_blocks_equals_that_of_the_whole_image() -> None:
    """1,100 x 1,050 pixels are four blocks."""
    noise = np.random.default_rng(0).integers(0, 256, (1050, 1100, 4), dtype=np.uint8)
    rgba = Image.fromarray(noise, "RGBA")
    palette = rgba.convert("P")
    palette.info["transparency"] = bytes(range(0, 256, 4))
    for image in (rgba, rgba.convert("LA"), rgba.convert("CMYK"), palette, rgba.convert("1"), rgba.convert("YCbCr")):
        if image.has_transparency_data:
            layer = image.convert("RGBA")
            expected = Image.new("RGB", image.size, (255, 255, 255))
            expected.paste(layer, mask=layer.getchannel("A"))
        else:
            expected = image.convert("RGB")
        assert upright_rgb(image, "x", keep_open=True).tobytes() == expected.tobytes(), image.mode
    deep = noise[..., 0].astype(np.uint16) * 257
    rgb = np.asarray(upright_rgb(Image.fromarray(deep), "x", keep_open=True))
    assert np.array_equal(rgb, np.repeat(noise[..., :1], 3, axis=2))


def grey(values: list[float], dtype: Any) -> list[int]:
    image = upright_rgb(Image.fromarray(np.array([values], dtype=dtype)), "x", keep_open=True)
    return [pixel[0] for pixel in image.get_flattened_data()]  # type: ignore[index]


def test_deep_grey_is_scaled_even_if_floats_slightly_exceed_their_range() -> None:
    assert grey([0.0, 0.2, 1.0], np.float32) == [0, 51, 255]
    assert grey([-0.1, 0.2, 1.0, 1.04], np.float32) == [0, 51, 255, 255]  # as bicubic resampling leaves them
    assert grey([0.0, 51.0, 255.0, 259.0], np.float32) == [0, 51, 255, 255]
    assert grey([0.0, 257.0 * 51, 65535.0], np.float32) == [0, 51, 255]
    assert grey([0, 51, 255], np.int32) == [0, 51, 255]
    assert grey([0, 257 * 51, 65535], np.int32) == [0, 51, 255]
    with pytest.raises(DataError, match="NaN or infinite values"):
        grey([0.0, float("nan")], np.float32)


def test_keep_open_leaves_the_image_open() -> None:
    mine = Image.open(io.BytesIO(encoded(GRADIENT)))
    upright_rgb(mine, "x", keep_open=True)
    assert mine.getpixel((0, 0)) == GRADIENT.getpixel((0, 0))


def test_a_tile_much_larger_than_its_image_is_not_decoded() -> None:
    assert opened(tiled_tiff(16, 64)).size == (16, 16)
    bomb = tiled_tiff(16, 8192)
    assert len(bomb) < 70_000
    with pytest.raises(DataError, match="16x16 pixels in tiles of 8192x8192: a decompression bomb"):
        opened(bomb)


def test_a_jpeg_of_many_scans_is_not_decoded() -> None:
    content = encoded(Image.new("L", (64, 64), 200), "JPEG", progressive=True)
    usual = num_scans(content)
    assert 2 <= usual <= 10
    last = content.rindex(b"\xff\xda")
    scan = content[last:-2]
    with pytest.raises(DataError, match="JPEG of more than 100 scans"):
        opened(content[:-2] + scan * 100 + b"\xff\xd9")
    # Video data after the image, as phones append it, and a preview in its header are not counted.
    preview = b"\xff\xd8" + b"\xff\xda\x00\x02" * 200 + b"\xff\xd9"
    head = b"\xff\xd8\xff\xe7" + (len(preview) + 2).to_bytes(2, "big") + preview
    assert num_scans(head + content[2:] + b"\xff\xda" * 500) == usual
    assert opened(head + content[2:] + b"\xff\xda" * 500).size == (64, 64)


def test_large_images_wait_for_each_other_and_small_ones_do_not() -> None:
    budget, decoding, peak = PixelBudget(), 0, 0
    lock = threading.Lock()

    def decode(side: int) -> None:
        nonlocal decoding, peak
        with budget.reserve(Image.new("1", (side, side)), 100):
            with lock:
                decoding += side * side
                peak = max(peak, decoding)
            time.sleep(0.02)
            with lock:
                decoding -= side * side

    threads = [threading.Thread(target=decode, args=(side,)) for side in (5, 9, 9, 5, 5, 20, 9, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    # 20 x 20 pixels exceed the budget, so that image is decoded alone.
    assert peak == 400
    budget = PixelBudget()
    with budget.reserve(Image.new("1", (5, 5)), 100), budget.reserve(Image.new("1", (5, 5)), 100):
        pass


MEMORY = """
import io
import numpy as np
from PIL import Image
from vlmrl.data.decode import open_header, upright_rgb
from vlmrl.data.image_source import Encoded
def content(kind, side, mode, **options):
    image = Image.new("P" if mode == "P" else mode, (side, side))
    if mode == "P":
        image.putpalette([0, 0, 0]); options["transparency"] = bytes([0])
    file = io.BytesIO(); image.save(file, kind, **options); return file.getvalue()
side = 4000
kinds = [("PNG", "I;16"), ("PNG", "1"), ("PNG", "P"), ("PNG", "LA"), ("TIFF", "F"), ("TIFF", "I"), ("GIF", "L")]
files = [content(kind, side, mode) for kind, mode in kinds]
np.asarray(upright_rgb(Image.new("LA", (9, 9)), "x", keep_open=True))
def memory(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024
for file, kind in zip(files, kinds):
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    before = memory("VmRSS")
    upright_rgb(open_header(Encoded(file, "x"), max_pixels=side * side), "x", keep_open=False)
    print(*kind, (memory("VmHWM") - before) / side**2, flush=True)
"""


def test_decoding_takes_a_few_bytes_per_pixel_in_every_mode() -> None:
    result = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, check=True)
    peaks = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in result.stdout.splitlines()}
    assert len(peaks) == 7
    # Pillow stores RGB in 4 bytes, and deep grey or LA in 4 more; the rest is the blocks.
    assert max(peaks.values()) < 13, peaks


@pytest.mark.filterwarnings("ignore")
def test_any_damage_raises_a_data_error() -> None:
    rng = random.Random(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(GRADIENT.convert("RGB"), kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP", "TIFF")]
    files += [encoded(GRADIENT, "GIF"), encoded(GRADIENT, "BMP"), encoded(GRADIENT, "JPEG", progressive=True)]
    files += [encoded(Image.new(mode, (9, 9)), "TIFF", compression="tiff_lzw") for mode in ("I;16", "F", "CMYK", "P")]
    num_refused = 0
    for _ in range(1500):
        content = bytearray(rng.choice(files))
        for _ in range(rng.choice((1, 2, 8))):
            position = rng.randrange(rng.choice((len(content), min(100, len(content)))))
            content[position : position + rng.choice((0, 1, 1, 5))] = rng.randbytes(rng.choice((0, 1, 1, 1, 4)))
        try:
            opened(bytes(content))
        except DataError:
            num_refused += 1
    assert num_refused > 500
