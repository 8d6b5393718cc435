"""The moving average on one rank, by hand. With DeepSpeed, on two ranks: end_to_end/test_optimizers_ranks.py."""

from pathlib import Path

import pytest
import torch
from torch import nn

from vlmrl.errors import ConfigError
from vlmrl.learning.deepspeed_engine import init_distributed
from vlmrl.learning.ema import Ema, _owners


@pytest.fixture(scope="module", autouse=True)
def _alone() -> None:
    init_distributed(timeout_s=60)


def net(*, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(1, 2, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [2.0]]))
        layer.bias.zero_()
    return layer


def move(module: nn.Linear, by: float) -> None:
    with torch.no_grad():
        module.weight += by


def test_the_average_matches_its_definition() -> None:
    module = net()
    ema = Ema(module, beta=0.75)
    move(module, 4.0)
    ema.update()
    # 0.75 * 1 + 0.25 * 5 = 2; then 0.75 * 2 + 0.25 * 9 = 3.75
    assert ema.state()["weight"].flatten().tolist() == [2.0, 3.0]
    move(module, 4.0)
    ema.update()
    assert ema.state()["weight"].flatten().tolist() == [3.75, 4.75]
    assert ema.state()["bias"].tolist() == [0.0, 0.0]


def test_frozen_parameters_have_no_average() -> None:
    module = net()
    module.bias.requires_grad_(False)
    assert list(Ema(module, beta=0.5).state()) == ["weight"]


def test_the_average_is_more_precise_than_the_weights() -> None:
    module = net(dtype=torch.bfloat16)
    ema = Ema(module, beta=0.992)
    move(module, 0.125)
    ema.update()
    # 1 + 0.008 * 0.125 = 1.001, and next to 1 bf16 has 1.0078.
    assert ema.state()["weight"][0].item() == pytest.approx(1.001, abs=1e-6)
    with ema.swapped():
        assert module.weight[0].item() == 1.0
    assert module.weight[0].item() == 1.125


def test_swapping_restores_the_weights_to_the_last_bit_even_after_an_error() -> None:
    module = net()
    ema = Ema(module, beta=0.5)
    move(module, 1 / 3)
    ema.update()
    before, place = module.weight.detach().clone(), module.weight.data_ptr()

    def save() -> None:
        with ema.swapped():
            assert torch.equal(module.weight, ema.state()["weight"])
            assert not torch.equal(module.weight, before)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        save()
    assert torch.equal(module.weight, before)
    assert module.weight.data_ptr() == place  # the optimizer holds this memory


def test_a_resumed_run_has_the_same_average(tmp_path: Path) -> None:
    module = net()
    ema = Ema(module, beta=0.75)
    move(module, 4.0)
    ema.update()
    ema.save(tmp_path)
    other = Ema(module, beta=0.75)
    other.load(tmp_path)
    for average in (ema, other):
        average.update()
    assert all(torch.equal(other.state()[name], tensor) for name, tensor in ema.state().items())
    # The loaded average is a copy.
    assert other.state()["weight"].data_ptr() != ema.state()["weight"].data_ptr()


def test_a_checkpoint_without_an_average_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"written without a moving average: .*train.enable_ema") as caught:
        Ema(net(), beta=0.5).load(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_average_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="1 tensors of the moving average differ, such as weight"):
        Ema(net(), beta=0.5).load_state(Ema(nn.Linear(2, 2), beta=0.5).state())


def test_unsharded_averages_are_spread_evenly_over_ranks() -> None:
    sizes = {"a": 6, "b": 5, "c": 4, "d": 3}
    trained = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    # Largest first, each to the rank with the least so far: 6 + 3 and 5 + 4.
    assert _owners(trained, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert _owners(trained, 1) == dict.fromkeys(sizes, 0)
