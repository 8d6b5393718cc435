import asyncio
import time
from pathlib import Path

import pytest
from rewards.responses import group
from rewards.user_functions import FUNCTIONS, user_rewarder

from vlmrl.config.reward import Reward
from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards.function_worker import RewardResult
from vlmrl.rewards.rewarder import Rewarder, check_functions, combined

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leftover_processes")]


async def test_the_total_is_the_weighted_sum_and_the_parts_are_unweighted() -> None:
    reward = Reward(functions={"exact": 2.0, "format": 0.5})
    async with Rewarder(reward) as rewarder:
        scores = await rewarder.score([group("\\boxed{7}", "7"), group("8", "\\boxed{8}", "7.0")])
    assert [[score.total for score in row] for row in scores] == [[2.5, 2.0], [0.0, 0.5, 2.0]]
    assert scores[1][1].parts == {"exact": 0.0, "format": 1.0}
    assert not any(score.failed for row in scores for score in row)


async def test_no_groups_have_no_scores() -> None:
    async with Rewarder(Reward(functions={"exact": 1.0})) as rewarder:
        assert await rewarder.score([]) == []


async def test_a_users_function_works_beside_the_built_in_ones(user_file: Path) -> None:
    reward = Reward(functions={"exact": 1.0}, remote_url=f"{user_file}:length", remote_weight=-0.1)
    async with Rewarder(reward) as rewarder:
        (score,) = (await rewarder.score([group("7.0")]))[0]
    assert score.parts == {"exact": 1.0, "length": 3.0}
    assert score.total == pytest.approx(0.7)


async def test_a_function_may_name_its_parts(user_file: Path) -> None:
    async with user_rewarder(user_file, "parts") as rewarder:
        (score,) = (await rewarder.score([group("x")]))[0]
    assert (score.total, score.parts) == (2.0, {"parts": 2.0, "parts/a_b": 1.0, "parts/c": 1.0})


async def test_begun_groups_are_scored_in_the_background(user_file: Path) -> None:
    groups = [group("a", index=1), group("bb", index=2)]
    async with user_rewarder(user_file, "slow", num_workers=2) as rewarder:
        start = time.perf_counter()
        for begun in groups:
            await rewarder.begin(begun)
        assert time.perf_counter() - start < 0.4
        await asyncio.sleep(1.2)
        start = time.perf_counter()
        # Calls across processes pass copies of the groups.
        scores = await rewarder.score([group("bb", index=2), group("a", index=1)])
        assert time.perf_counter() - start < 0.4
    assert [[score.total for score in row] for row in scores] == [[2.0], [1.0]]


async def test_each_begin_is_collected_once_and_other_groups_begin_in_score(user_file: Path) -> None:
    async with user_rewarder(user_file, "length") as rewarder:
        await rewarder.begin(group("a"))
        await rewarder.begin(group("a"))
        await rewarder.begin(group("ccc", index=9))
        scores = await rewarder.score([group("a"), group("bb"), group("a"), group("a")])
        assert [[score.total for score in row] for row in scores] == [[1.0], [2.0], [1.0], [1.0]]
        assert (await rewarder.score([group("ccc", index=9)]))[0][0].total == 3.0
        assert not rewarder._begun


async def test_a_missing_label_is_an_error_in_begin_and_in_score() -> None:
    async with Rewarder(Reward(functions={"exact": 1.0})) as rewarder:
        for method in (rewarder.begin, lambda group: rewarder.score([group])):
            with pytest.raises(RewardError, match=r"set data\.label_key"):
                await method(group("7", label=None))


async def test_only_failures_of_the_scored_groups_count(user_file: Path) -> None:
    bad, good = group("bad", "bad", index=1), group("good", "good", index=2)
    async with user_rewarder(user_file, "raises", max_failed_fraction=0.25) as rewarder:
        await rewarder.begin(bad)
        await rewarder.begin(good)
        assert [s.total for s in (await rewarder.score([good]))[0]] == [1.0, 1.0]
        with pytest.raises(RewardError, match="scored none of the first 2 of 2 responses"):
            await rewarder.score([bad])


async def test_failures_of_a_part_count_against_the_whole_step(user_file: Path) -> None:
    async with user_rewarder(user_file, "offline", max_failed_fraction=0.25) as rewarder:
        result = (await rewarder.score([group("bad", "good")], out_of=8))[0]
        assert [score.failed for score in result] == [True, False]
        with pytest.raises(RewardError, match="3 of 8 responses could not be scored"):
            await rewarder.score([group("bad", "bad", "bad", "good")], out_of=8)
        await rewarder.score([group("bad", "good")], out_of=8, failed=1)
        with pytest.raises(RewardError, match="3 of 8 responses"):
            await rewarder.score([group("bad", "good")], out_of=8, failed=2)


async def test_too_many_failures_of_the_infrastructure_stop_the_run_with_the_first_reason(user_file: Path) -> None:
    async with user_rewarder(user_file, "offline", max_failed_fraction=0.25) as rewarder:
        await rewarder.score([group("good", "good", "good", "bad")])
        with pytest.raises(RewardError) as error:
            await rewarder.score([group("good", "good", "bad", "bad")])
    assert str(error.value).startswith(
        "2 of 4 responses could not be scored, more than reward.max_failed_fraction 0.25"
    )
    assert "ConnectionRefusedError: nobody listens" in str(error.value)


async def test_only_a_reward_that_always_fails_stops_the_run(
    user_file: Path,
) -> None:
    async with user_rewarder(user_file, "raises", max_failed_fraction=0.0) as rewarder:
        result = await rewarder.score([group("bad", "bad"), group("bad", "good")])
        assert [score.failure for scores in result for score in scores] == ["response"] * 3 + [None]
        await rewarder.score([group("bad", "bad")], out_of=8)
        with pytest.raises(RewardError) as error:
            await rewarder.score([group("bad", "bad"), group("bad")])
    line = FUNCTIONS.splitlines().index('        raise ValueError("cannot\\nscore this")') + 1
    assert str(error.value).startswith("raises of reward.remote_url scored none of the first 3 of 3 responses")
    assert "ValueError: cannot score this" in str(error.value)
    assert f"my_reward.py:{line}), on shapes:17" in str(error.value)
    assert "\n" not in str(error.value)


async def test_a_response_too_hard_for_a_built_in_function_does_not_stop_the_run() -> None:
    reward = Reward(functions={"math": 1.0}, time_limit_s=0.5, max_failed_fraction=0.0)
    async with Rewarder(reward) as rewarder:
        result = (await rewarder.score([group("\\boxed{9^{9^{9^9}}}", "\\boxed{9^{9^{9^8}}}")]))[0]
    assert [score.failure for score in result] == ["response", "response"]


async def test_each_failure_has_its_reason(user_file: Path) -> None:
    async with user_rewarder(user_file, "raises", max_failed_fraction=0.5) as rewarder:
        good, bad = (await rewarder.score([group("good", "bad")]))[0]
    assert good.problem is None
    assert str(bad.problem).startswith("ValueError: cannot score this (")


async def test_an_early_stop_reports_at_least_so_many_failures(user_file: Path) -> None:
    async with user_rewarder(user_file, "offline", max_failed_fraction=0.1) as rewarder:
        with pytest.raises(RewardError, match=r"^at least 2 of 16 responses could not be scored"):
            await rewarder.score([group(*["bad"] * 16)])
        with pytest.raises(RewardError, match=r"^1 of 1 responses"):
            await rewarder.score([group("bad")])


async def test_a_missing_label_names_the_row() -> None:
    message = "shapes:17 has no label, and the reward function exact"
    async with Rewarder(Reward(functions={"exact": 1.0})) as rewarder:
        with pytest.raises(RewardError, match=message):
            await rewarder.score([group("7"), group("7", label=None)])
    async with Rewarder(Reward(functions={"format": 1.0})) as rewarder:
        assert (await rewarder.score([group("\\boxed{7}", label=None)]))[0][0].total == 1.0


def test_a_failure_of_the_response_comes_before_one_of_the_infrastructure(user_file: Path) -> None:
    results = {
        "a": RewardResult(problem="gone", blame="infrastructure"),
        "b": RewardResult(problem="broken", retried="death"),
        "c": RewardResult(1.0),
    }
    weights = dict.fromkeys(results, 1.0)
    assert combined(results, weights) == RewardResult(parts={"c": 1.0}, problem="broken", retried="death")
    results["b"] = RewardResult(2.0, retried="timeout")
    gone = combined(results, weights)
    assert (gone.value, gone.failure, gone.problem, gone.retried) == (0.0, "infrastructure", "gone", "timeout")


def test_checking_functions_leaves_nothing_behind(user_file: Path) -> None:
    check_functions(Reward(remote_url=f"{user_file}:length"))
    with pytest.raises(ConfigError, match="has no function missing"):
        check_functions(Reward(remote_url=f"{user_file}:missing"))
