from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vlmrl.data.media import InlineMedia
from vlmrl.data.reference_cache import ReferenceCache, sample_key
from vlmrl.errors import ConfigError
from vlmrl.types import Sample


def sample(*tokens: int, row: str = "toy:0") -> Sample:
    return Sample(np.array(tokens), np.arange(len(tokens)) > 0, source=row)


def test_values_survive_a_restart(tmp_path: Path) -> None:
    first = ReferenceCache(tmp_path / "reference.jsonl", reference="m")
    samples = [sample(1, 2), sample(1, 3), sample(1, 2)]
    assert first.missing(samples) == [samples[2], samples[1]]
    first.add(samples[:2], np.array([-0.1, -1 / 3]))
    first.set_complete(8, data="d")
    again = ReferenceCache(tmp_path / "reference.jsonl", reference="m")
    assert again.missing(samples) == []
    assert again.values(samples).tolist() == [-0.1, -1 / 3, -0.1]
    assert len(again) == 2
    assert again.is_complete(8, data="d")
    assert not again.is_complete(9, data="d")
    assert not again.is_complete(8, data="other")


def test_half_a_line_of_a_killed_run_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "reference.jsonl"
    ReferenceCache(path, reference="m").add([sample(1, 2)], np.array([-1.0]))
    whole = path.read_text()
    path.write_text(whole + '{"key": "ab')
    cache = ReferenceCache(path, reference="m")
    assert len(cache) == 1
    assert path.read_text() == whole


def test_another_reference_or_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.jsonl"
    ReferenceCache(path, reference="m")
    with pytest.raises(ConfigError, match="was computed with m, and this run's reference is other"):
        ReferenceCache(path, reference="other")
    path.write_text("what?\n")
    with pytest.raises(ConfigError, match="is damaged"):
        ReferenceCache(path, reference="m")


def test_a_key_depends_on_tokens_images_and_response_alone() -> None:
    one = sample(1, 2, 3)
    image = InlineMedia("ab", (28, 28), np.zeros((28, 28, 3), dtype=np.uint8))
    others = [sample(1, 2, 4), replace(one, sampled=np.array([False, False, True])), replace(one, media=(image,))]
    assert len({sample_key(row) for row in [one, *others]}) == 4
    assert sample_key(one) == sample_key(replace(one, source="b", group=4, response=9))
