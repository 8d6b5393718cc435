"""The cache of image features: what it holds, for how long, and when it refuses."""

import pytest
import torch
from torch import nn

from vlmrl.errors import ConfigError, VlmrlError
from vlmrl.models.scorer import ImageFeatures
from vlmrl.models.vision_cache import VisionCache

CPU = torch.device("cpu")


def features(value: float, rows: int = 2, levels: int = 0) -> ImageFeatures:
    """`rows` of 4 numbers, 16 bytes each; and as many for each level."""
    return ImageFeatures(
        torch.full((rows, 4), value), tuple(torch.full((rows, 4), value + n) for n in range(1, 1 + levels))
    )


def cache(max_bytes: int, *, trains: bool = False) -> VisionCache:
    return VisionCache([nn.Parameter(torch.zeros(1), requires_grad=trains)], max_bytes=max_bytes)


def held(found: VisionCache, names: str) -> str:
    return "".join(found.take(names, device=CPU))


def test_what_was_put_is_found_again_with_every_level() -> None:
    made = cache(1000)
    made.put({"a": features(1.0, levels=2), "b": features(5.0, rows=3)})
    found = made.take(["b", "a", "c"], device=CPU)
    assert list(found) == ["b", "a"]
    assert found["a"].rows.tolist() == [[1.0] * 4] * 2
    assert [level.tolist() for level in found["a"].deepstack] == [[[2.0] * 4] * 2, [[3.0] * 4] * 2]
    assert found["b"].deepstack == ()
    # 3 * 2 rows, and 3.
    assert made.num_bytes == 16 * 9


def test_the_least_recently_used_go_first_and_the_bytes_stay_within_the_bound() -> None:
    made = cache(16 * 6)
    made.put({name: features(0.0) for name in "abc"})
    assert made.num_bytes == 16 * 6
    made.take("a", device=CPU)
    made.put({"d": features(0.0)})
    assert held(made, "abcd") == "acd"
    # Four rows push out two of two: a was taken first just now.
    made.put({"e": features(0.0, rows=4)})
    assert held(made, "abcde") == "de"
    assert made.num_bytes == 16 * 6
    # Put again, a name takes its old place's bytes.
    made.put({"e": features(9.0, rows=1)})
    assert made.num_bytes == 16 * 3
    assert made.take("e", device=CPU)["e"].rows.tolist() == [[9.0] * 4]


def test_more_images_than_fit_leave_the_last_ones() -> None:
    made = cache(16 * 4)
    made.put({name: features(0.0) for name in "abcde"})
    assert held(made, "abcde") == "de"


def test_a_cache_smaller_than_one_image_is_refused_with_both_sizes() -> None:
    with pytest.raises(
        ConfigError, match=r"vision\.cache_gib .* not even one image, which takes 2\.0 MiB: raise it, or"
    ):
        cache(2**20).put({"a": ImageFeatures(torch.zeros(2**18, 2))})
    # Levels count.
    with pytest.raises(ConfigError, match="not even one image"):
        cache(16 * 5).put({"a": features(0.0, levels=2)})


def test_what_trains_is_never_cached() -> None:
    parameter = nn.Parameter(torch.zeros(1), requires_grad=False)
    made = VisionCache([nn.Parameter(torch.zeros(1), requires_grad=False), parameter], max_bytes=1000)
    made.put({"a": features(1.0)})
    assert held(made, "a") == "a"
    parameter.requires_grad_(True)
    with pytest.raises(VlmrlError, match=r"kept while the vision tower or projector trains: freeze both .*cache_gib 0"):
        made.take("a", device=CPU)


def test_what_is_kept_has_neither_a_graph_nor_other_images_behind_it() -> None:
    tower = torch.ones(6, 4, requires_grad=True)
    both = tower * 2
    made = cache(1000)
    made.put({"a": ImageFeatures(both[:2], (both[2:4],))})
    kept = made.take("a", device=CPU)["a"]
    for level in (kept.rows, *kept.deepstack):
        assert not level.requires_grad
        assert level.untyped_storage().nbytes() == 16 * 2
    with torch.no_grad():
        tower.zero_()
        both.zero_()
    assert kept.rows.unique().tolist() == [2.0]


def test_other_weights_make_it_empty() -> None:
    made = cache(16 * 4)
    made.put({"a": features(0.0), "b": features(0.0)})
    made.clear()
    assert held(made, "ab") == ""
    assert made.num_bytes == 0
    made.put({"c": features(0.0, rows=4)})
    assert held(made, "abc") == "c"
