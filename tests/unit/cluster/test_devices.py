import pytest

from vlmrl.cluster.devices import gpu_names, visible_gpus
from vlmrl.errors import ClusterError


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 3, ("0", "1", "2")),
        ("4,5,7", 3, ("4", "5", "7")),
        # Ray was told of fewer.
        ("4,5,7", 2, ("4", "5")),
        (" 2, 0", 2, ("2", "0")),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1d", 2, ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1d")),
        ("MIG-GPU-8932f937/1/0", 1, ("MIG-GPU-8932f937/1/0",)),
        ("", 0, ()),
        ("NoDevFiles", 0, ()),
    ],
)
def test_slots_are_named_as_their_node_names_them(visible: str | None, count: int, names: tuple[str, ...]) -> None:
    assert gpu_names(visible, count, where="node a") == names


def test_cuda_reads_a_list_up_to_its_first_mistake_and_ray_does_not() -> None:
    with pytest.raises(ClusterError, match=r"node 10\.0\.0\.7 has 3 GPUs.*shows 1 of them \('2,-1,3'\)") as caught:
        gpu_names("2,-1,3", 3, where="node 10.0.0.7")
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_named_twice_is_no_second_gpu() -> None:
    with pytest.raises(ClusterError, match=r"CUDA_VISIBLE_DEVICES of node a names 3 twice \('3, 3'\)"):
        gpu_names("3, 3", 2, where="node a")


def test_nobody_is_asked_where_there_is_no_gpu() -> None:
    assert visible_gpus({}) == {}
