"""Engine and trainer compute the same with the same version."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from scripted_loop import config, make_prompt, make_rollout

from vlmrl.data.experience import Experience
from vlmrl.errors import SyncError
from vlmrl.types import Floats, Group, Sample
from vlmrl.verify.logprobs import (
    check_groups,
    check_versions,
    compare_engine,
    largest_gap,
    rounding,
    with_logprobs,
)


def test_a_step_without_sampled_tokens_has_no_gap() -> None:
    empty = Experience(
        samples=[Sample(np.array([1]), np.array([False]))],
        advantages=[np.zeros(1, np.float32)],
        old_logprobs=None,
        rollout_logprobs=[np.ones(1, np.float32)],
    )
    assert compare_engine(empty, [np.zeros(1, np.float32)])["sync/logprob_diff_max"] == 0.0


def test_versions_agree_when_all_responses_are_new() -> None:
    prompt = make_prompt(0)
    check_versions([Group(prompt, (make_rollout(prompt, "a", version=3),))], version=3)


@pytest.mark.parametrize(("held", "is_allowed"), [(0, False), (1, True), (3, True), (4, False)])
def test_versions_may_be_as_old_as_the_queue_is_long_and_never_newer(held: int, is_allowed: bool) -> None:
    prompt = make_prompt(0)
    with nullcontext() if is_allowed else pytest.raises(SyncError, match=r"async_queue_size allows 2 before"):
        check_versions([Group(prompt, (make_rollout(prompt, "a", version=held),))], version=3, max_age=2)


def test_a_few_responses_are_compared_by_what_both_compute_now() -> None:
    prompt = make_prompt(0)
    groups = [Group(prompt, (make_rollout(prompt, "a", version=1, length=3),)) for _ in range(2)]

    again = with_logprobs(groups, [s.logprobs * 2 for group in groups for s in group.segments])
    # They were recorded with -0.5 on two unsampled and three sampled tokens.
    assert [segment.logprobs.tolist() for group in again for segment in group.segments] == [[0, 0, -1, -1, -1]] * 2
    assert [segment.versions.tolist() for segment in again[0].segments] == [[-1, -1, 1, 1, 1]]

    def trainer(off: float) -> list[Floats]:
        return [s.logprobs + np.float32(off) * s.sampled for g in again for s in g.segments]

    assert check_groups(config(), again, trainer(5e-4))["sync/logprob_diff_mean"] == pytest.approx(5e-4, rel=1e-3)
    with pytest.raises(SyncError, match=r"differ by 0\.002 on average"):
        check_groups(config(), again, trainer(2e-3))


def test_engines_on_the_original_base_of_a_4_bit_policy_are_bound_only_on_request() -> None:
    def bound(qlora_base: str, **vllm: float) -> float:
        ds = {"param_dtype": "fp32", "load_in_4bit": True, "lora": {"rank": 4}}
        return largest_gap(config(ds=ds, vllm={"qlora_base": qlora_base} | vllm))

    assert bound("dequantized") == 1e-3
    assert bound("original") == float("inf")
    assert bound("original", max_logprob_diff=0.2) == 0.2


def test_the_bound_on_rounding_follows_the_type() -> None:
    assert rounding(config()) == 1e-6
    assert rounding(config(ds={"param_dtype": "bf16"})) == 0.025
    assert rounding(config(ds={"param_dtype": "bf16"}, vllm={"max_logprob_diff": 0.02})) == 0.005
    original = {"param_dtype": "bf16", "load_in_4bit": True, "lora": {"rank": 4}}
    assert rounding(config(ds=original, vllm={"qlora_base": "original"})) == 0.025, "where there is no bound too"
