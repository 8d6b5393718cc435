import pytest

from vlmrl.config import ds
from vlmrl.config.ds import Ds


@pytest.mark.parametrize(("has_gpu", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_the_automatic_precision_is_that_of_the_machine_and_nobody_meets_auto(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, dtype: str
) -> None:
    monkeypatch.setattr(ds, "has_gpu", lambda: has_gpu)
    assert Ds(param_dtype="auto").param_dtype == dtype
    assert Ds(param_dtype="auto").model_dump()["param_dtype"] == dtype
    assert Ds(param_dtype="fp32").param_dtype == "fp32"
    assert Ds().param_dtype == "bf16"
