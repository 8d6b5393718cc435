"""Rows of any shape never end a run, and each warning about a row is one printable line."""

import datetime as dt
import json
import logging
import pickle
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vlmrl.config.data import Columns
from vlmrl.data.prompts import PromptStream
from vlmrl.data.rows import Rows, from_hugging_face, load_rows
from vlmrl.errors import DataError
from vlmrl.plugins import Processor
from vlmrl.rewards.label_check import LabelCheck
from vlmrl.types import Prompt

ROWS_OF_AN_EXAMPLE = 60
ROWS_OF_A_TABLE = 20
EXAMPLES = 25
"""Examples per property: 5,000 rows in total."""
GOOD = {"input": "1 + 1?", "label": "2", "images": [], "more": None}
KEYS = ("input", "label", "images", "more")
COLUMNS = Columns(max_dropped_fraction=1.0, max_len=512, max_images_per_prompt=3)

# fmt: off
PIECES = (
    "<image>", "<|im_end|>", "<|image_pad|>", "\ufdd0", "\ud800", "\udfff", "\x00", "\x1b[2J", "\n", "\u2028", "\u202e",
    "[/x]", "[bold]", ":smile:", "é", "e\u0301", "４", "\\boxed{", "}", "{}", "{{ 1 // 0 }}", "$", "user", "assistant",
    "a.png", "~nosuch/x", "~", "../../etc/passwd", "/dev/null", "file:///a%20b.png", "http://a b/", "http://127.0.0.1:1/",
    "data:image/png;base64,", "data:,", "A" * 40, "=" * 7, "//", "1e999", "-0", "nan", "[1, 2", "null",
)
# fmt: on
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=6).map("".join)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXT,
    st.binary(max_size=20),
    st.sampled_from(
        [10**400, Decimal("1.50"), Decimal("nan"), dt.date(2024, 1, 31), object(), range(3), {1, 2}, b"\x89PNG"]
    ),
    st.sampled_from(
        [np.zeros((2, 2)), np.float32(0.1), np.array(["a"]), np.zeros((4, 4, 3), np.uint8), np.datetime64("nat")]
    ),
)
ANY = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | st.integers(0, 3), inner, max_size=4),
    max_leaves=8,
)


def nested(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


DEEP = st.sampled_from([2, 20, 63, 64, 600, 5000]).map(nested)
PICTURE = st.sampled_from(
    [
        Image.new("RGB", (56, 56)),
        Image.new("1", (1, 1)),
        Image.new("F", (8, 8)),
        Image.new("RGB", (1, 900)),
        Image.new("P", (28, 28)),
        Image.new("RGB", (0, 5)),
    ]
)
PART = st.one_of(
    TEXT,
    st.just({"type": "image"}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image", "image_url", "video", None])}, optional={"text": ANY}
    ),
    ANY,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "user<|im_end|>", "", None]) | ANY},
    optional={"content": st.lists(PART, max_size=3) | ANY, "name": ANY, "tool_calls": ANY},
)
MESSAGES = st.lists(MESSAGE, max_size=4)
IMAGES = st.one_of(
    PICTURE,
    TEXT,
    st.lists(PICTURE | TEXT | ANY, max_size=4),
    st.fixed_dictionaries({}, optional={"bytes": ANY, "path": ANY}),
    ANY,
)
COLUMN_POOLS = st.fixed_dictionaries(
    {
        "input": st.lists(TEXT | MESSAGES | ANY | DEEP, min_size=8, max_size=8),
        "label": st.lists(TEXT | ANY | DEEP, min_size=4, max_size=4),
        "images": st.lists(IMAGES, min_size=6, max_size=6),
        "more": st.lists(ANY | ANY | DEEP, min_size=4, max_size=4),
    }
)
"""Values of each column; rows combine them, since drawing new values for each row would take most of the time."""


def combined(pools: dict[str, list[Any]], count: int) -> list[dict[str, Any]]:
    """Make rows with one value of each pool; every fifth lacks a column."""
    valid = {"input": "valid", "images": [], "label": "1", "more": 1}
    rows = []
    for i in range(count):
        row = {key: pool[(i * step) % len(pool)] for step, (key, pool) in zip((1, 3, 5, 7), pools.items(), strict=True)}
        # Otherwise the first bad value would hide the others.
        row |= {key: valid[key] for place, key in enumerate(KEYS) if (i >> place) & 1 and i % 3}
        if i % 5 == 0:
            del row[KEYS[i // 5 % 4]]
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def label_problems() -> Iterator[LabelCheck]:
    # Not `math`, whose parser runs in a separate process.
    check = LabelCheck(["exact"])
    yield check
    check.close()


def check(rows: Iterable[Any], processor: Processor, label_problems: LabelCheck) -> None:
    """Check that every row becomes a valid prompt, or is dropped and named in a warning."""
    check_rows(Rows(name="mine", rows=[*rows], columns=KEYS), processor, label_problems)


def check_rows(rows: Rows, processor: Processor, label_problems: LabelCheck) -> None:
    """Check rows of any dataset. A good row is added, since a run without a usable row ends."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    try:
        stream = PromptStream(
            [rows, Rows(name="good", rows=[GOOD], columns=KEYS)],
            probs=None,
            processor=processor,
            columns=COLUMNS,
            seed=0,
            label_problems=label_problems,
        )
    except DataError as error:
        # Refused before any row is drawn: a column with images that is not read.
        if "has images in column" not in str(error):
            raise
        return
    logging.getLogger("vlmrl.data").addHandler(handler)
    try:
        prompts = stream.all_prompts(len(rows) + 1)
        again = json.loads(json.dumps(stream.state()))
    finally:
        logging.getLogger("vlmrl.data").removeHandler(handler)
    stream.load_state(again)
    assert len(prompts) + len(lines) == len(prompts) + sum(stream.dropped.values()) == len(rows) + 1
    assert all(line.isprintable() and len(line) < 700 for line in lines)
    for prompt in prompts:
        check_prompt(prompt)


def check_prompt(prompt: Prompt) -> None:
    """Check that a prompt can be sent to engines and reward functions and written to transcripts."""
    assert len(prompt.tokens) > 0
    assert prompt.label is None or prompt.label.encode()
    assert prompt.text.encode()
    assert json.dumps(dict(prompt.metadata), ensure_ascii=False).encode()
    pickle.loads(pickle.dumps(prompt))


quick = settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@quick
@given(COLUMN_POOLS)
def test_rows_of_any_shape_for_a_text_model(
    text_model: Processor, label_problems: LabelCheck, pools: dict[str, list[Any]]
) -> None:
    check(combined(pools, ROWS_OF_AN_EXAMPLE), text_model, label_problems)


@quick
@given(COLUMN_POOLS)
def test_rows_of_any_shape_for_a_vision_model(
    vlm: Processor, label_problems: LabelCheck, pools: dict[str, list[Any]]
) -> None:
    check(combined(pools, ROWS_OF_AN_EXAMPLE), vlm, label_problems)


LINE = st.one_of(
    st.binary(max_size=40),
    TEXT.map(lambda text: text.encode(errors="surrogatepass")),
    st.integers(0, 100_000).map(lambda depth: b"[" * depth),
    st.just(b'{"input": "a", "more": ' + b"9" * 5000 + b"}"),
    st.just(b'{"input": "a", "input": [1e999, NaN]}'),
    st.just(b"\xff\xfe{\x00}\x00"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=6,
)


@quick
@given(st.lists(LINE, min_size=5, max_size=5), COLUMN_POOLS)
def test_json_lines_of_any_shape(
    tmp_path_factory: pytest.TempPathFactory,
    vlm: Processor,
    label_problems: LabelCheck,
    broken: list[bytes],
    pools: dict[str, list[Any]],
) -> None:
    """Values that JSON cannot hold are written as their Python repr."""
    file = tmp_path_factory.mktemp("lines") / "mine.jsonl"
    lines = [broken[i % 5] if i % 4 == 1 else as_json(row) for i, row in enumerate(combined(pools, ROWS_OF_AN_EXAMPLE))]
    file.write_bytes(b"\n".join(lines))
    check_rows(load_rows(str(file), split="train", max_samples=10**6, seed=0), vlm, label_problems)


def as_json(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, default=repr, skipkeys=True).encode()
    except (ValueError, RecursionError):  # too many digits, too deep lists
        return b'{"input": ' + b"[" * 2000


CELLS: tuple[tuple[pa.DataType, Any], ...] = (
    (pa.null(), None),
    (pa.bool_(), True),
    (pa.int8(), -1),
    (pa.uint64(), 2**40),
    (pa.float32(), 0.1),
    (pa.float64(), float("nan")),
    (pa.decimal128(10, 2), Decimal("1.50")),
    (pa.date32(), dt.date(2024, 1, 31)),
    (pa.time64("us"), dt.time(12)),
    (pa.timestamp("ns"), dt.datetime(2024, 1, 31)),
    (pa.timestamp("s", tz="UTC"), dt.datetime(2024, 1, 31)),
    (pa.duration("s"), dt.timedelta(1)),
    (pa.string(), "a <image>"),
    (pa.large_string(), "a"),
    (pa.binary(), b"\x00raw"),
    (pa.list_(pa.float32()), [0.1, None]),
    (pa.list_(pa.float32(), 2), [0.1, 0.2]),
    (pa.large_list(pa.string()), ["a"]),
    (pa.list_(pa.binary()), [b"\x00raw"]),
    (pa.struct({"bytes": pa.binary(), "path": pa.string()}), {"bytes": b"", "path": "a\x1b.png"}),
    (pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})), [{"role": "user", "content": "a"}]),
)
ENCODED = [
    datasets.Image(),
    datasets.List(datasets.Image()),
    {"inner": datasets.Image()},
    datasets.List({"inner": datasets.Image()}),
    datasets.ClassLabel(names=["no", "yes"]),
]
SHAPES: tuple[Any, ...] = (*CELLS, *ENCODED)


@quick
@given(st.tuples(*(st.none() | st.sampled_from(SHAPES) for _ in KEYS)))
def test_tables_of_any_type(vlm: Processor, label_problems: LabelCheck, shapes: tuple[Any, ...]) -> None:
    picture = {"bytes": b"\x89PNG cut", "path": None}
    pictures = [picture, [picture], {"inner": picture}, [{"inner": picture}], 1]
    features, columns = {}, {}
    for key, shape in zip(KEYS, shapes, strict=True):
        if shape is None:
            features[key] = datasets.Value("string")
            cell = None if key == "images" else "valid"
        elif isinstance(shape, tuple):
            features[key] = datasets.features.features.generate_from_arrow_type(shape[0])
            cell = shape[1]
        else:
            features[key] = shape
            cell = pictures[ENCODED.index(shape)]
        columns[key] = [cell, "valid" if shape is None and key == "input" else None] * (ROWS_OF_A_TABLE // 2)
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    try:
        check_rows(from_hugging_face("mine", table), vlm, label_problems)
    except DataError as error:
        # Unread images are an error in the settings, raised before any row is used.
        if "has images in column" not in str(error):
            raise


@pytest.mark.prove
@pytest.mark.timeout(3600)
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(COLUMN_POOLS)
def test_many_more_rows_of_any_shape(vlm: Processor, label_problems: LabelCheck, pools: dict[str, list[Any]]) -> None:
    check(combined(pools, ROWS_OF_AN_EXAMPLE), vlm, label_problems)
