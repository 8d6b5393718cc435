"""Names of GPUs in CUDA_VISIBLE_DEVICES."""

import pytest

from vlmrl.cluster.devices import gpu_names, visible_gpus
from vlmrl.errors import ClusterError


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 3, ("0", "1", "2")),
        ("4,5,7", 3, ("4", "5", "7")),
        # Ray was started with fewer.
        ("4,5,7", 2, ("4", "5")),
        (" 2, 0", 2, ("2", "0")),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1d", 2, ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1d")),
        ("MIG-GPU-8932f937/1/0", 1, ("MIG-GPU-8932f937/1/0",)),
        ("", 0, ()),
        ("NoDevFiles", 0, ()),
    ],
)
def test_slots_have_the_names_of_their_node(visible: str | None, count: int, names: tuple[str, ...]) -> None:
    assert gpu_names(visible, count, where="node a") == names


def test_the_list_is_read_up_to_its_first_malformed_name_as_cuda_does() -> None:
    with pytest.raises(
        ClusterError, match=r"Ray counts 3 GPUs on node 10\.0\.0\.7.*shows 1 of them \('2,-1,3'\)"
    ) as caught:
        gpu_names("2,-1,3", 3, where="node 10.0.0.7")
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"CUDA_VISIBLE_DEVICES of node a lists 3 twice \('3, 3'\)"):
        gpu_names("3, 3", 2, where="node a")


def test_without_gpus_no_node_is_asked() -> None:
    assert visible_gpus({}) == {}
