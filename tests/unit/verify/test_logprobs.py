"""Engine and trainer compute the same with the same version."""

from __future__ import annotations

import numpy as np
from scripted_loop import config, make_prompt, make_rollout

from vlmrl.data.experience import Experience
from vlmrl.types import Group, Sample
from vlmrl.verify.logprobs import check_versions, compare_engine, largest_gap, rounding


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
