"""The checks of the self-test that need a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vlmrl.commands.self_test import engines, layers, ranks, serving
from vlmrl.commands.self_test.serving import Pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serving.shared(tmp_path_factory.mktemp("serving")) as pair:
        yield pair


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "check",
    ["generates", "syncs_by_memory", "syncs_by_device", "sleeps", "adapts", "checks_adapters"],
)
def test_engine_and_policy_on_one_gpu_agree(check: str, pair: Pair) -> None:
    getattr(serving, check)(pair)


@pytest.mark.timeout(600)
def test_weights_are_sent_between_two_gpus(tmp_path: Path) -> None:
    with serving.apart(tmp_path) as pair:
        serving.syncs_by_device(pair)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", [engines.fp8, engines.pipeline])
def test_engines_in_fp8_and_in_stages_agree_with_transformers(check: object, tmp_path: Path) -> None:
    assert callable(check)
    check(tmp_path)


@pytest.mark.parametrize("check", [layers.nf4, layers.eight_bit_adam, layers.liger, ranks.check])
def test_the_gpu_dependencies_of_a_run_work(check: object, tmp_path: Path) -> None:
    assert callable(check)
    check(tmp_path)
