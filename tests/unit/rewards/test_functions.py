import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from rewards.responses import Picture, group
from rewards.user_functions import totals, user_rewarder

from vlmrl.config.reward import Reward
from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards.rewarder import Rewarder

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leftover_processes")]


async def start_and_end(rewarder: Rewarder) -> None:
    async with rewarder:
        pass


async def test_a_function_receives_declared_arguments_and_its_own_images(user_file: Path) -> None:
    groups = [group("x", "y", "z", media=(Picture(),))]
    assert await totals(user_rewarder(user_file, "everything"), groups) == [[1.0, 1.0, 1.0]]
    assert await totals(user_rewarder(user_file, "by_keyword"), groups) == [[1.0, 1.0, 1.0]]
    assert await totals(user_rewarder(user_file, "numpy_number"), groups) == [[0.5, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("function", "settings", "failure", "retried"),
    [
        ("raises", {}, "response", None),
        ("hangs", {"time_limit_s": 0.3}, "response", "timeout"),
        ("holds_on", {"time_limit_s": 0.3}, "response", "timeout"),
        ("dies", {}, "response", "death"),
        ("leaves", {}, "response", None),
        ("dies", {"num_workers": 2}, "response", "death"),
        ("offline", {}, "infrastructure", None),
        ("wrapped", {}, "infrastructure", None),
    ],
)
async def test_an_error_for_one_response_fails_that_response_alone(
    user_file: Path, function: str, settings: dict[str, object], failure: str, retried: str | None
) -> None:
    async with user_rewarder(user_file, function, max_failed_fraction=0.5, **settings) as rewarder:
        scores = await rewarder.score([group("good", "bad"), group("good", "good")])
        assert [[(s.total, s.failed) for s in row] for row in scores] == [[(1, False), (0, True)], [(1, False)] * 2]
        assert (scores[0][1].failure, scores[0][1].retried) == (failure, retried)
        assert [s.total for s in (await rewarder.score([group("good", "good")]))[0]] == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["timeout", "death"])
async def test_a_failed_call_is_repeated_in_a_fresh_process(user_file: Path, kind: str) -> None:
    async with user_rewarder(user_file, "once", max_failed_fraction=0.0, time_limit_s=1.0) as rewarder:
        (before, score, after) = (await rewarder.score([group("good", kind, "good")]))[0]
    assert (score.total, score.failure, score.retried) == (1.0, None, kind), "its process had made no other call"
    assert (before.retried, after.retried) == (None, None)


async def test_not_all_of_many_hanging_calls_are_repeated(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrl.rewards.functions._MAX_FAILED_RETRIES", 3)
    async with user_rewarder(user_file, "hangs", max_failed_fraction=0.0, time_limit_s=0.1, num_workers=2) as rewarder:
        for _ in range(2):
            scores = (await rewarder.score([group("good", *["bad"] * 5, "good")]))[0]
            assert [score.failure for score in scores] == [None, *["response"] * 5, None]
            assert [score.retried for score in scores[1:-1]] == ["timeout"] * 3 + [None] * 2


async def test_a_call_that_hangs_twice_is_the_responses_failure(user_file: Path) -> None:
    async with user_rewarder(user_file, "dies", max_failed_fraction=0.0) as rewarder:
        with pytest.raises(RewardError) as error:
            await rewarder.score([group("bad")])
    assert "dies ended its process (exit code 3), also in a second, separate try, on shapes:17" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "it returned nan, which is not a finite number"),
        ("inf", "it returned inf, which is not a finite number"),
        ("huge", "it returned inf, which is not a finite number"),
        ("none", "it returned None where one number per response is expected"),
        ("list", "it returned a list of 2 where one number per response is expected"),
        ("text", "it returned a str of 1 where one number per response is expected"),
        ("array", "it returned a ndarray of 3 where one number per response is expected"),
        ("dict", "it returned a dict without 'total' (keys: ['score'])"),
        ("part", "it returned 'c' = a list of 1 where one number per response is expected"),
    ],
)
async def test_anything_but_one_number_is_a_failure_with_a_reason(user_file: Path, kind: str, message: str) -> None:
    async with user_rewarder(user_file, "returns", max_failed_fraction=0.0) as rewarder:
        with pytest.raises(RewardError) as error:
            await rewarder.score([group(kind)])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


async def test_processes_that_die_after_begin_are_replaced(user_file: Path) -> None:
    groups = [group("good", index=1), group("bad", "good", index=2), group("good", "good", index=3)]
    async with user_rewarder(user_file, "dies", num_workers=2, max_failed_fraction=0.5) as rewarder:
        for begun in groups:
            await rewarder.begin(begun)
        await asyncio.sleep(0.5)
        assert [[s.failed for s in row] for row in await rewarder.score(groups[1:])] == [[True, False], [False, False]]
        assert [[s.failed for s in row] for row in await rewarder.score(groups[:1])] == [[False]]


async def test_images_are_kept_until_they_are_scored(user_file: Path) -> None:
    left = sorted(Path(tempfile.gettempdir()).glob("vlmrl-rewards-*"))
    groups = [group("x", "y", media=(Picture(),), index=number) for number in range(3)]
    async with user_rewarder(user_file, "everything") as rewarder:
        for begun in groups:
            await rewarder.begin(begun)
        assert [[s.total for s in row] for row in await rewarder.score(groups)] == [[1.0, 1.0]] * 3
    assert sorted(Path(tempfile.gettempdir()).glob("vlmrl-rewards-*")) == left


async def test_a_process_that_dies_while_idle_is_replaced(user_file: Path) -> None:
    async with user_rewarder(user_file, "dies_later") as rewarder:
        assert (await rewarder.score([group("x")]))[0][0].total == 1.0
        await asyncio.sleep(0.6)
        assert (await rewarder.score([group("x")]))[0][0].total == 1.0


async def test_a_coroutine_is_not_a_number(user_file: Path) -> None:
    async with user_rewarder(user_file, "later") as rewarder:
        with pytest.raises(RewardError, match="write def, not async def"):
            await rewarder.score([group("x")])


async def test_a_function_that_always_hangs_stops_the_run_after_two_limits(user_file: Path) -> None:
    # 0.3 s for the first response; 0.3 s for its second try and, in parallel, for the second response.
    message = (
        r"scored none of the first 2 of 80 responses.*longer than reward.time_limit_s 0\.3, "
        "also in a second, separate try"
    )
    async with user_rewarder(user_file, "hangs", time_limit_s=0.3) as rewarder:
        with pytest.raises(RewardError, match=message):
            await rewarder.score([group(*["bad"] * 80)])


async def test_a_function_that_returned_for_another_response_does_not_always_hang(user_file: Path) -> None:
    async with user_rewarder(user_file, "hangs", time_limit_s=1.0, num_workers=4) as rewarder:
        scores = (await rewarder.score([group("bad", "bad", "good", "good")]))[0]
    assert [score.failure for score in scores] == ["response", "response", None, None]


async def test_output_of_a_reward_is_in_its_log_even_if_its_process_is_killed(user_file: Path, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rewards.log"
    reward = Reward.model_validate({"functions": {}, "remote_url": f"{user_file}:talks"})
    async with Rewarder(reward, log=log) as rewarder:
        await rewarder.score([group("good", "bad")])
    lines = log.read_text().splitlines()
    assert lines == ["I see good", "natively", *["I see bad", "natively"] * 2]
    assert log.stat().st_mode & 0o111 == 0, "it is no program"


async def test_close_does_not_wait_for_processes_forked_by_a_function(user_file: Path) -> None:
    async with user_rewarder(user_file, "forks") as rewarder:
        await rewarder.score([group("a")])
        end = time.monotonic()
    assert time.monotonic() - end < 5


async def test_a_second_try_does_not_wait_for_threads_of_the_one_before(user_file: Path) -> None:
    async with user_rewarder(user_file, "stays") as rewarder:
        start = time.monotonic()
        assert [score.total for score in (await rewarder.score([group("a", "b")]))[0]] == [1.0, 1.0]
        assert time.monotonic() - start < 15


async def test_a_program_that_a_function_waits_for_ends_with_its_process(user_file: Path) -> None:
    async with user_rewarder(user_file, "starts", max_failed_fraction=1.0, time_limit_s=0.5) as rewarder:
        await rewarder.score([group("a")])
        pids = [int(line) for line in Path(f"{user_file}.pids").read_text().split()]
        deadline = time.monotonic() + 10
        while not all(map(_is_zombie, pids)) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        running = [pid for pid in pids if not _is_zombie(pid)]
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    assert len(pids) == 2
    assert not running


@pytest.mark.parametrize("limit", [0.5, 10.0], ids=["the pool stops it", "it stops itself"])
async def test_a_hostile_response_fails_as_the_responses_failure(limit: float) -> None:
    reward = Reward(functions={"math": 1.0}, time_limit_s=limit, max_failed_fraction=0.5)
    async with Rewarder(reward) as rewarder:
        scores = (await rewarder.score([group("\\boxed{9^{9^{9^9}}}", "\\boxed{7}")]))[0]
    assert [(s.total, s.failure, s.retried) for s in scores] == [(0.0, "response", "timeout"), (1.0, None, None)]


async def test_a_killed_built_in_function_is_called_again() -> None:
    # As the kernel does without free memory. The comparison takes a second, and is killed halfway.
    hard = "\\boxed{x^{900}+y}"
    async with Rewarder(Reward(functions={"math": 1.0}, max_failed_fraction=0.0)) as rewarder:
        await rewarder.score([group("\\boxed{7}")])
        (scorer,) = multiprocessing.active_children()
        before = _work(scorer.pid)
        await rewarder.begin(group(hard))
        while _work(scorer.pid) < before + 0.1:
            await asyncio.sleep(0.01)
        os.kill(int(scorer.pid or 0), signal.SIGKILL)
        (score,) = (await rewarder.score([group(hard)]))[0]
    assert (score.total, score.failure, score.retried) == (0.0, None, "death")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", "has no function missing"),
        ("elsewhere", "TRL's signature and requires completion_ids"),
        ("asks", "requires difficulty"),
        ("blind", "does not take response"),
    ],
)
async def test_a_function_that_cannot_be_called_is_refused_at_the_start(
    user_file: Path, function: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        await start_and_end(user_rewarder(user_file, function))
    assert message in str(error.value)
    assert str(error.value).startswith("reward.remote_url: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("body", ["import nowhere", "def f(:", "raise RuntimeError('no')", "import sys; sys.exit(1)"])
async def test_a_file_that_does_not_import_is_refused_at_the_start(tmp_path: Path, body: str) -> None:
    (tmp_path / "broken.py").write_text(body)
    with pytest.raises(ConfigError, match=r"reward\.remote_url: .*broken\.py does not import"):
        await start_and_end(user_rewarder(tmp_path / "broken.py", "f"))


async def test_a_file_that_ends_its_process_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(1)")
    with pytest.raises(ConfigError, match="ends its process when it is imported"):
        await start_and_end(user_rewarder(tmp_path / "deadly.py", "f"))


async def test_modules_in_the_working_directory_are_not_those_of_libraries(
    user_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.chdir(tmp_path)
    async with user_rewarder(user_file, "safe_path") as rewarder:
        assert (await rewarder.score([group("x")]))[0][0].total == 0.0, "programs of a function see the folder"
    assert "PYTHONSAFEPATH" not in os.environ


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="your function is called math"):
        Rewarder(Reward(functions={"math": 1.0}, remote_url="x.py:math"))


@pytest.mark.parametrize(
    "left", ["pass", "threading.Thread(target=time.sleep, args=(60,)).start()"], ids=["nothing left", "a thread left"]
)
def test_a_killed_run_leaves_no_scoring_process(tmp_path: Path, left: str) -> None:
    (tmp_path / "leaves.py").write_text(f"import threading, time\n{left}\ndef f(response): return 1.0\n")
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio, multiprocessing
            from vlmrl.config.reward import Reward
            from vlmrl.rewards.rewarder import Rewarder
            async def main():
                async with Rewarder(Reward(functions={"exact": 1.0}, remote_url="leaves.py:f", num_workers=2)):
                    server = multiprocessing.forkserver._forkserver._forkserver_pid
                    print(server, *[child.pid for child in multiprocessing.active_children()], flush=True)
                    await asyncio.sleep(60)
            if __name__ == "__main__":
                asyncio.run(main())
        """)
    )
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, env=environment, text=True
    ) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 3
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not all(map(_is_zombie, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(_is_zombie, pids))


def _work(pid: int | None) -> float:
    """CPU seconds of a process."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _is_zombie(pid: int) -> bool:
    # A zombie counts as ended: in a container, process 1 may never collect it.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
