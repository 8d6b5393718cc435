"""Calls of a role that is in another process, written as Python."""

from __future__ import annotations

import pytest

from vlmrl.cluster.remote_call import Call, recorded


def test_a_call_is_a_method_with_its_arguments() -> None:
    assert recorded(lambda policy: policy.set_progress(0.5)) == Call("set_progress", (0.5,), {})
    call = recorded(lambda policy, packs: policy.logprobs(packs, adapter=False), ["pack"])
    assert call == Call("logprobs", (["pack"],), {"adapter": False})


def test_what_is_no_single_call_is_refused() -> None:
    with pytest.raises(AssertionError, match="one method of the role"):
        recorded(lambda policy: len(policy.table().method))
    with pytest.raises(AssertionError, match="one method of the role"):
        recorded(lambda policy: policy.table)
