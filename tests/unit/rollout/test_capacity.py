from vlmrl.rollout.capacity import CPU, Demand, Limits, choose_limits, described, prompts_at_once

LARGE = Limits(1024, 16384)
"""What vLLM takes on an H100."""


def chosen(
    demand: Demand | None, most: Limits = LARGE, *, seqs: int | None = None, tokens: int | None = None
) -> Limits:
    return choose_limits(demand, most, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def test_there_is_room_for_everything_at_once() -> None:
    # 512 responses decode a token each beside eight prompts of 1,300 tokens.
    assert chosen(Demand(512, prompts=8, prompt_tokens=1300)) == (512, 512 + 8 * 1300)


def test_no_more_than_the_device_can_do_with() -> None:
    assert chosen(Demand(4096, prompts=512, prompt_tokens=1300)) == LARGE
    assert chosen(Demand(4096, prompts=512, prompt_tokens=1300), CPU) == (128, 2048)
    assert chosen(None) == LARGE


def test_a_small_run_takes_few_responses_and_no_fewer_tokens_than_vllms_least() -> None:
    assert chosen(Demand(16, prompts=4, prompt_tokens=100)) == (16, 2048)
    assert chosen(Demand(16, prompts=4, prompt_tokens=100), Limits(128, 1024)) == (16, 1024)


def test_the_users_own_are_taken_and_the_other_follows() -> None:
    demand = Demand(512, prompts=8, prompt_tokens=1300)
    assert chosen(demand, seqs=64, tokens=4096) == (64, 4096)
    assert chosen(demand, seqs=2000) == (2000, 512 + 8 * 1300)
    assert chosen(demand, CPU, seqs=4000) == (4000, 4000)
    assert chosen(demand, tokens=256) == (256, 256)


def test_prompts_are_dealt_out_so_that_a_slow_engine_gets_fewer() -> None:
    assert prompts_at_once(8, 2) == 4
    assert prompts_at_once(128, 1) == 64
    assert prompts_at_once(1024, 2) == 256


def test_the_limits_are_told() -> None:
    assert described(CPU) == "each engine: up to 128 responses and 2048 tokens at once"
