"""Lengths, decoding, phases and their times, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from vlmrl.config.verbs import RlConfig
from vlmrl.plan.costs import ModelCosts
from vlmrl.plan.decoding import decoding
from vlmrl.plan.fit import Measured, fitted
from vlmrl.plan.planner import nested
from vlmrl.plan.rates import GPUS, rates_of
from vlmrl.plan.step import TAIL, Part, Phase, Step, gathered, step_of
from vlmrl.plan.workload import Workload, mixed, response_lengths

COSTS = ModelCosts(
    parameters=200,
    trained=200,
    dense=100,
    output=50,
    experts=None,
    layers=2,
    hidden=4,
    attention=8,
    keys_and_values=4,
    published=200,
)
WORKLOAD = Workload(prompts=4, responses=2, prompt_tokens=10, lengths=(2.0, 4.0))


def rl(**settings: object) -> RlConfig:
    common = {"actor.model_name_or_path": "m", "data.prompt_dataset": "d", "rollout.batch_size": 4}
    common |= {"rollout.n_samples_per_prompt": 2, "train.batch_size": 8}
    return RlConfig.model_validate(nested(common | settings))


def work_of(config: RlConfig, name: str, kind: str, costs: ModelCosts = COSTS) -> dict[str, float]:
    step = step_of(config, costs, WORKLOAD, cache_bytes=1e9)
    phase = next(phase for phase in step.phases if phase.name == name)
    return {str(unit): amount for part in phase.parts if part.kind == kind for unit, amount in part.work.items()}


def test_lengths_have_the_mean_that_is_asked_for() -> None:
    lengths = response_lengths(1000, mean=512, longest=2048, sigma=0.8)
    assert fmean(lengths) == pytest.approx(512, rel=1e-3)
    assert lengths == tuple(sorted(lengths))
    assert lengths[-1] == 2048
    assert response_lengths(3, mean=8, longest=8, sigma=0.8) == (8.0, 8.0, 8.0)
    assert sorted(mixed(lengths)) == list(lengths)


def test_shared_prompts_are_computed_once() -> None:
    shared, packed = (WORKLOAD.training_load(layout) for layout in ("shared", "packed"))
    assert shared.tokens == 4 * 10 + 8 * 3
    assert packed.tokens == 8 * 13
    assert shared.pairs == 4 * 50 + 8 * (3 * 10 + 10 / 2)
    assert shared.outputs == packed.outputs == 24
    assert WORKLOAD.training_load("padded").tokens == 8 * 14


def test_decoding_reads_weights_and_cache_at_each_step() -> None:
    decoded = decoding(COSTS, (4.0,), prompt_tokens=10, slots=1)
    # Mean context 12; 150 parameters and 4 numbers per token of 2 bytes each.
    assert decoded.bulk["bytes"] == 4 * (2 * 150 + 12 * 8)
    assert decoded.bulk["flops"] == 4 * (2 * 150 + 4 * 8 * 12)
    assert decoded.steps == 4
    both = decoding(COSTS, (4.0, 8.0), prompt_tokens=10, slots=2)
    assert both.steps == 8
    assert both.bulk["rows"] == 4 * 2 + 4 * 1
    assert decoding(COSTS, (4.0, 8.0), prompt_tokens=10, slots=1).steps == 12


def test_the_longest_response_is_a_tail() -> None:
    decoded = decoding(COSTS, (4.0,) * 7 + (8.0,), prompt_tokens=10, slots=8)
    assert decoded.bulk["calls"] == 4
    assert decoded.tail["calls"] == 4
    assert decoded.tail["rows"] == 4
    assert decoded.largest == 8


def test_two_tensor_parallel_ranks_halve_what_each_reads() -> None:
    one, two = (decoding(COSTS, (4.0,), prompt_tokens=10, slots=1, tensor_parallel=n).bulk for n in (1, 2))
    assert two["bytes"] == one["bytes"] / 2
    assert two["link"] == 4 * (4 * 2 * 4 * 2)


def test_gathering_between_machines_is_shared_by_their_gpus() -> None:
    assert gathered(64.0, ranks=64, per_node=8) == {"link": 63.0, "network": 64 * 7 / 8 / 8}
    assert gathered(64.0, ranks=8, per_node=8) == {"link": 56.0}
    assert gathered(64.0, ranks=1, per_node=1) == {}


def test_zero_3_gathers_weights_twice_and_reduces_gradients() -> None:
    config = rl(**{"actor.num_gpus_per_node": 4, "ds.zero_stage": 3})
    train = work_of(config, "update", "train")
    assert train["link"] == (2 * 400 + 400) * 3 / 4
    assert train["flops"] == 3 * (2 * 100 * 64 + 2 * 50 * 24 + 4 * 8 * WORKLOAD.training_load("shared").pairs) / 4
    assert work_of(config, "update", "optimizer")["bytes"] == 28 * 200 / 4


def test_each_update_has_passes_of_its_own() -> None:
    config = rl(**{"train.batch_size": 4, "train.max_tokens_per_gpu": 20})
    # 64 tokens in two updates, of two passes each.
    assert work_of(config, "update", "train")["constant"] == 4
    assert work_of(rl(**{"train.max_tokens_per_gpu": 20}), "update", "train")["constant"] == 4
    assert work_of(rl(), "update", "train")["constant"] == 1


def test_zero_2_keeps_weights_and_gathers_updated_ones() -> None:
    config = rl(**{"actor.num_gpus_per_node": 4, "ds.zero_stage": 2})
    assert work_of(config, "update", "train")["link"] == 400 * 3 / 4
    assert work_of(config, "update", "optimizer")["link"] == 400 * 3 / 4


def test_offload_takes_the_way_to_main_memory() -> None:
    config = rl(**{"actor.num_gpus_per_node": 4, "ds.zero_stage": 2, "ds.adam_offload": True})
    assert work_of(config, "update", "optimizer")["host"] == 34 * 200 / 4


def test_a_sync_publishes_what_is_trained() -> None:
    config = rl(**{"vllm.sync_backend": "nccl"})
    assert work_of(config, "sync", "sync")["link"] == 200 * 2
    assert work_of(config, "sync", "sync", replace(COSTS, published=10))["link"] == 20
    assert work_of(rl(), "sync", "sync")["host"] == 400 + 400


def test_the_reference_takes_a_pass_and_several_updates_one_for_old_log_probs() -> None:
    assert "logprob" not in {phase.name for phase in step_of(rl(), COSTS, WORKLOAD, cache_bytes=1e9).phases}
    forward = 2 * 100 * 64 + 2 * 50 * 24 + 4 * 8 * WORKLOAD.training_load("shared").pairs
    assert work_of(rl(**{"algo.kl.init_coef": 0.1}), "logprob", "score")["flops"] == forward
    assert work_of(rl(**{"train.batch_size": 4}), "logprob", "score")["flops"] == forward


def test_an_asynchronous_step_overlaps_the_rollout() -> None:
    rates = {("decode", "calls"): 1.0, ("train", "flops"): 1.0}
    rollout = Phase("rollout", (Part("decode", {"calls": 4.0}), Part("decode", {"calls": 2.0}, is_tail=True)))
    phases = (rollout, Phase("update", (Part("train", {"flops": 3.0}),)))
    assert Step(phases, queue=0).seconds(rates) == 9.0  # type: ignore[arg-type]
    assert Step(phases, queue=1).seconds(rates) == 4.5  # type: ignore[arg-type]
    assert Step(phases, queue=8).seconds(rates) == 4.0  # type: ignore[arg-type]
    assert rollout.by_reason(rates)[TAIL] == 2.0  # type: ignore[arg-type]
    assert Step(phases, queue=0).binding(rates) == ("rollout", "overhead", 4 / 9)  # type: ignore[arg-type]
    # The engines take longer than the update, even without the tail.
    assert Step(phases, queue=8).binding(rates) == ("rollout", "overhead", 4 / 6)  # type: ignore[arg-type]
    slow = (rollout, Phase("update", (Part("train", {"flops": 7.0}),)))
    assert Step(slow, queue=8).binding(rates) == ("update", "compute", 1.0)  # type: ignore[arg-type]


def test_an_h100_takes_its_data_sheets_time() -> None:
    rates = rates_of(GPUS["H100"])
    assert rates["train", "flops"] == pytest.approx(1 / (0.4 * 989e12))
    assert rates["decode", "bytes"] == pytest.approx(1 / (0.6 * 3.35e12))


def made(calls: float, rows: float, seconds: float) -> Measured:
    phase = Phase("rollout", (Part("decode", {"calls": calls, "rows": rows}),))
    return Measured(Step((phase,), queue=0), {"rollout": seconds})


def test_one_run_scales_all_rates_of_a_phase() -> None:
    rates = fitted([made(10, 20, 6.0)], {("decode", "calls"): 0.1, ("decode", "rows"): 0.1, ("train", "flops"): 1.0})
    assert rates["decode", "calls"] == pytest.approx(0.2, rel=0.05)
    assert rates["decode", "rows"] == pytest.approx(0.2, rel=0.05)
    assert rates["train", "flops"] == 1.0


def test_several_runs_tell_rates_apart() -> None:
    runs = [made(calls, rows, 0.5 * calls + 0.02 * rows) for calls, rows in ((10, 10), (10, 1000), (100, 100))]
    rates = fitted(runs, {("decode", "calls"): 0.1, ("decode", "rows"): 0.1})
    assert rates["decode", "calls"] == pytest.approx(0.5, rel=0.2)
    assert rates["decode", "rows"] == pytest.approx(0.02, rel=0.15)
