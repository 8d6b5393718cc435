import pytest

from vlmrl.config.ds import Ds
from vlmrl.startup import driver


@pytest.mark.parametrize(
    ("has_gpu", "visible", "dtype"), [(True, "0", "bf16"), (True, "", "fp32"), (False, "0", "fp32")]
)
def test_auto_precision_is_resolved_by_the_machine(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, visible: str, dtype: str
) -> None:
    monkeypatch.setattr(driver, "has_gpu", lambda: has_gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Ds(param_dtype="auto").param_dtype == dtype
    assert Ds(param_dtype="auto").model_dump()["param_dtype"] == dtype
    assert Ds(param_dtype="fp32").param_dtype == "fp32"
    assert Ds().param_dtype == "bf16"
