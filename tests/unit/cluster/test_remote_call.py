"""Remote calls, recorded from lambdas."""

from __future__ import annotations

import pytest

from vlmrl.cluster.remote_call import Call, record_call


def test_a_call_is_a_method_with_its_arguments() -> None:
    assert record_call(lambda policy: policy.set_progress(0.5)) == Call("set_progress", (0.5,), {})
    call = record_call(lambda policy, packs: policy.logprobs(packs, adapter=False), ["pack"])
    assert call == Call("logprobs", (["pack"],), {"adapter": False})


def test_anything_but_one_call_is_refused() -> None:
    with pytest.raises(AssertionError, match="one method call on the role"):
        record_call(lambda policy: len(policy.table().method))
    with pytest.raises(AssertionError, match="one method call on the role"):
        record_call(lambda policy: policy.table)
