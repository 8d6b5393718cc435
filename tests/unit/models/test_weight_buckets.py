"""Device digests, on CPU. Buckets: test_shared_memory.py."""

import pytest
import torch

from vlmrl.models import weight_buckets as module
from vlmrl.models.weight_buckets import checksum, device_digest


def test_the_checksum_is_the_weighted_sum_of_the_bits_modulo_2_to_the_64() -> None:
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def weight(place: int) -> int:
        """Splitmix64 of the position, from 1, made odd."""
        number = place * golden & mask
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
        number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
        return (number ^ number >> 31) | 1

    # 1.0 is 0x3F80 in bf16, and -2.0 is 0xC000: -0x4000 as a signed number of 16 bits.
    total = checksum(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert total % 2**64 == (0x3F80 * weight(1) - 0x4000 * weight(2)) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_equal_tensors_have_equal_digests_in_any_memory_layout(dtype: torch.dtype) -> None:
    tensor = (torch.arange(30) % 7).to(dtype).reshape(5, 6)
    same = torch.cat([torch.zeros(1, dtype=dtype), tensor.t().reshape(-1)])[1:].reshape(6, 5).t()
    assert not same.is_contiguous()
    assert device_digest("w", tensor) == device_digest("w", same)


def test_any_difference_changes_the_digest() -> None:
    tensor = torch.arange(1.0, 25.0).reshape(4, 6)
    lowest_bit = tensor.clone()
    lowest_bit.view(torch.int32)[2, 3] ^= 1
    others = [
        ("w", tensor.t().contiguous().reshape(4, 6)),  # the same numbers in another order
        ("w", tensor.reshape(6, 4)),
        ("w", tensor.view(torch.int32)),
        ("w", lowest_bit),
        ("w", torch.zeros(4, 6)),
        ("v", tensor),
    ]
    digests = {device_digest(name, other) for name, other in [("w", tensor), *others]}
    assert len(digests) == 1 + len(others)


def test_the_order_of_chunks_changes_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 4)
    first, second = torch.arange(4.0), torch.arange(4.0, 8.0)
    assert checksum(torch.cat([first, second])) != checksum(torch.cat([second, first]))


def test_empty_tensors_and_scalars_have_checksums() -> None:
    assert checksum(torch.zeros(0, 3)) == 0
    assert checksum(torch.tensor(3.0, requires_grad=True)) != checksum(torch.tensor(2.0))
