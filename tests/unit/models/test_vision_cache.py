"""The cache of image features: contents, eviction, refusals."""

import pytest
import torch
from torch import nn

from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.models.scorer import ImageFeatures
from vlmrl.models.vision_cache import VisionCache

CPU = torch.device("cpu")


def features(value: float, rows: int = 2, levels: int = 0) -> ImageFeatures:
    """Features of `rows` rows of 4 values, 16 bytes each, and as many rows for each level."""
    return ImageFeatures(
        torch.full((rows, 4), value), tuple(torch.full((rows, 4), value + n) for n in range(1, 1 + levels))
    )


def cache(max_bytes: int, *, trains: bool = False) -> VisionCache:
    return VisionCache([nn.Parameter(torch.zeros(1), requires_grad=trains)], max_bytes=max_bytes)


def held_names(filled: VisionCache, names: str) -> str:
    return "".join(filled.get(names, device=CPU))


def test_features_are_returned_with_every_level() -> None:
    made = cache(1000)
    made.put({"a": features(1.0, levels=2), "b": features(5.0, rows=3)})
    features_of = made.get(["b", "a", "c"], device=CPU)
    assert list(features_of) == ["b", "a"]
    assert features_of["a"].rows.tolist() == [[1.0] * 4] * 2
    assert [level.tolist() for level in features_of["a"].deepstack] == [[[2.0] * 4] * 2, [[3.0] * 4] * 2]
    assert features_of["b"].deepstack == ()
    # 3 * 2 rows, and 3.
    assert made.num_bytes == 16 * 9


def test_the_least_recently_used_are_evicted_and_the_bound_is_kept() -> None:
    made = cache(16 * 6)
    made.put({name: features(0.0) for name in "abc"})
    assert made.num_bytes == 16 * 6
    made.get("a", device=CPU)
    made.put({"d": features(0.0)})
    assert held_names(made, "abcd") == "acd"
    # Four rows evict two images of two rows; a was used last.
    made.put({"e": features(0.0, rows=4)})
    assert held_names(made, "abcde") == "de"
    assert made.num_bytes == 16 * 6
    # A name that is put again replaces its old features.
    made.put({"e": features(9.0, rows=1)})
    assert made.num_bytes == 16 * 3
    assert made.get("e", device=CPU)["e"].rows.tolist() == [[9.0] * 4]


def test_of_too_many_images_the_last_ones_stay() -> None:
    made = cache(16 * 4)
    made.put({name: features(0.0) for name in "abcde"})
    assert held_names(made, "abcde") == "de"


def test_a_cache_smaller_than_one_image_is_refused_with_both_sizes() -> None:
    with pytest.raises(
        ConfigError, match=r"vision\.cache_gib .* cannot hold a single image, which takes 2\.0 MiB: raise it, or"
    ):
        cache(2**20).put({"a": ImageFeatures(torch.zeros(2**18, 2))})
    # Levels count too.
    with pytest.raises(ConfigError, match="cannot hold a single image"):
        cache(16 * 5).put({"a": features(0.0, levels=2)})


def test_features_of_trainable_parameters_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(1), requires_grad=False)
    made = VisionCache([nn.Parameter(torch.zeros(1), requires_grad=False), parameter], max_bytes=1000)
    made.put({"a": features(1.0)})
    assert held_names(made, "a") == "a"
    parameter.requires_grad_(True)
    with pytest.raises(
        VlmrlError, match=r"cached while the vision tower or projector trains: freeze both .*cache_gib 0"
    ):
        made.get("a", device=CPU)


def test_cached_features_hold_neither_a_graph_nor_other_images() -> None:
    tower = torch.ones(6, 4, requires_grad=True)
    both = tower * 2
    made = cache(1000)
    made.put({"a": ImageFeatures(both[:2], (both[2:4],))})
    kept = made.get("a", device=CPU)["a"]
    for level in (kept.rows, *kept.deepstack):
        assert not level.requires_grad
        assert level.untyped_storage().nbytes() == 16 * 2
    with torch.no_grad():
        tower.zero_()
        both.zero_()
    assert kept.rows.unique().tolist() == [2.0]


def test_clearing_empties_the_cache() -> None:
    made = cache(16 * 4)
    made.put({"a": features(0.0), "b": features(0.0)})
    made.clear()
    assert held_names(made, "ab") == ""
    assert made.num_bytes == 0
    made.put({"c": features(0.0, rows=4)})
    assert held_names(made, "abc") == "c"
