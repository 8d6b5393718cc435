import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rewards.answers import Picture, group

from vlmrl.config.reward import Reward
from vlmrl.errors import ConfigError, RewardError
from vlmrl.rewards.local_worker import Verdict
from vlmrl.rewards.rewarder import Rewarder, check_functions, combined
from vlmrl.types import Group

FUNCTIONS = """
import os, time, sys
import numpy as np

def length(response): return len(response)
def parts(response): return {"total": 2.0, "a b": 1, "c": True}
def everything(prompt, response, label, images, metadata):
    pixel = images[0].getpixel((0, 0))
    images[0].putpixel((0, 0), (9, 9, 9))
    seen = (prompt, label, images[0].size, pixel, metadata["family"])
    return float(seen == ("how many?", "7", (5, 4), (1, 2, 3), "x"))
def by_keyword(response, **known): return float(sorted(known) == ["label", "metadata", "prompt"])
def numpy_number(response): return np.float32(0.5)

def raises(response):
    if response == "bad":
        raise ValueError("cannot\\njudge this")
    return 1.0
def hangs(response):
    while response == "bad":
        time.sleep(0.01)
    return 1.0
def holds_on(response):
    while response == "bad":
        try:
            time.sleep(0.01)
        except BaseException:
            pass
    return 1.0
def dies(response):
    if response == "bad":
        os._exit(3)
    return 1.0
def leaves(response):
    if response == "bad":
        sys.exit("bye")
    return 1.0
def returns(response): return {"nan": float("nan"), "inf": float("inf"), "none": None, "list": [1.0, 2.0], "text": "1",
    "array": np.ones(3), "dict": {"score": 1.0}, "huge": 10**400, "part": {"total": 1.0, "c": [1]}}.get(response, 1.0)
def slow(response):
    time.sleep(0.6)
    return len(response)
def dies_later(response):
    import threading
    threading.Timer(0.2, os._exit, (1,)).start()
    return 1.0
def talks(response):
    print("I see", response)
    os.write(2, b"natively\\n")
    if response == "bad":
        os.kill(os.getpid(), 9)
    return 1.0
async def later(response): return 1.0

calls = 0
def once(response):
    global calls
    calls += 1
    mark = f"{__file__}.{response}"
    if response != "good" and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), 9) if response == "death" else time.sleep(60)
    return calls if response != "good" else 1.0
def offline(response):
    if response == "bad":
        raise ConnectionRefusedError("nobody listens")
    return 1.0
def wrapped(response):
    try:
        return offline(response)
    except OSError as error:
        raise RuntimeError("no judge") from error

def elsewhere(completions, completion_ids): return [1.0]
def asks(response, difficulty): return 1.0
def blind(prompt): return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "my_reward.py"
    path.write_text(FUNCTIONS)
    return path


def own(file: Path, function: str, **settings: object) -> Rewarder:
    reward = Reward.model_validate({"functions": {}, "remote_url": f"{file}:{function}"} | settings)
    return Rewarder(reward)


def totals(rewarder: Rewarder, groups: Sequence[Group]) -> list[list[float]]:
    with rewarder:
        return [[score.total for score in scores] for scores in rewarder.score(groups)]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()
    assert multiprocessing.forkserver._forkserver._forkserver_pid is None  # type: ignore[attr-defined]


def test_the_total_is_the_weighted_sum_and_the_parts_are_unweighted() -> None:
    reward = Reward(functions={"exact": 2.0, "format": 0.5})
    with Rewarder(reward) as rewarder:
        scores = rewarder.score([group("\\boxed{7}", "7"), group("8", "\\boxed{8}", "7.0")])
    assert [[score.total for score in row] for row in scores] == [[2.5, 2.0], [0.0, 0.5, 2.0]]
    assert scores[1][1].parts == {"exact": 0.0, "format": 1.0}
    assert not any(score.failed for row in scores for score in row)


def test_no_groups_have_no_scores() -> None:
    with Rewarder(Reward(functions={"exact": 1.0})) as rewarder:
        assert rewarder.score([]) == []


def test_your_own_function_stands_beside_the_built_in_ones(file: Path) -> None:
    reward = Reward(functions={"exact": 1.0}, remote_url=f"{file}:length", remote_weight=-0.1)
    with Rewarder(reward) as rewarder:
        (score,) = rewarder.score([group("7.0")])[0]
    assert score.parts == {"exact": 1.0, "length": 3.0}
    assert score.total == pytest.approx(0.7)


def test_a_function_may_name_its_parts(file: Path) -> None:
    with own(file, "parts") as rewarder:
        (score,) = rewarder.score([group("x")])[0]
    assert (score.total, score.parts) == (2.0, {"parts": 2.0, "parts/a_b": 1.0, "parts/c": 1.0})


def test_a_function_gets_what_it_declares_and_images_of_its_own(file: Path) -> None:
    groups = [group("x", "y", "z", media=(Picture(),))]
    assert totals(own(file, "everything"), groups) == [[1.0, 1.0, 1.0]]
    assert totals(own(file, "by_keyword"), groups) == [[1.0, 1.0, 1.0]]
    assert totals(own(file, "numpy_number"), groups) == [[0.5, 0.5, 0.5]]


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
def test_what_goes_wrong_for_one_answer_fails_that_answer_alone(
    file: Path, function: str, settings: dict[str, object], failure: str, retried: str | None
) -> None:
    with own(file, function, max_failed_fraction=0.5, **settings) as rewarder:
        scores = rewarder.score([group("good", "bad"), group("good", "good")])
        assert [[(s.total, s.failed) for s in row] for row in scores] == [[(1, False), (0, True)], [(1, False)] * 2]
        assert (scores[0][1].failure, scores[0][1].retried) == (failure, retried)
        assert [s.total for s in rewarder.score([group("good", "good")])[0]] == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["timeout", "death"])
def test_a_call_that_went_wrong_once_is_made_again_in_a_fresh_process(file: Path, kind: str) -> None:
    with own(file, "once", max_failed_fraction=0.0, time_limit_s=1.0) as rewarder:
        (before, score, after) = rewarder.score([group("good", kind, "good")])[0]
    assert (score.total, score.failure, score.retried) == (1.0, None, kind), "its process had made no other call"
    assert (before.retried, after.retried) == (None, None)


def test_many_calls_that_never_end_are_not_all_made_again(file: Path) -> None:
    with own(file, "hangs", max_failed_fraction=0.0, time_limit_s=0.1, num_workers=2) as rewarder:
        for _ in range(2):
            scores = rewarder.score([group("good", *["bad"] * 20, "good")])[0]
            assert [score.failure for score in scores] == [None, *["response"] * 20, None]
            assert [score.retried for score in scores[1:-1]] == ["timeout"] * 16 + [None] * 4


def test_what_never_ends_is_the_responses_doing_after_the_second_time(file: Path) -> None:
    with own(file, "dies", max_failed_fraction=0.0) as rewarder, pytest.raises(RewardError) as error:
        rewarder.score([group("bad")])
    assert "dies ended its process (exit code 3), also when tried again alone, on shapes:17" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nan", "it returned nan, which is not a finite number"),
        ("inf", "it returned inf, which is not a finite number"),
        ("huge", "it returned inf, which is not a finite number"),
        ("none", "it returned None where one number per answer is wanted"),
        ("list", "it returned a list of 2 where one number per answer is wanted"),
        ("text", "it returned a str of 1 where one number per answer is wanted"),
        ("array", "it returned a ndarray of 3 where one number per answer is wanted"),
        ("dict", "it returned a dict without 'total' (keys: ['score'])"),
        ("part", "it returned 'c' = a list of 1 where one number per answer is wanted"),
    ],
)
def test_what_is_not_one_number_is_a_failure_that_says_so(file: Path, kind: str, said: str) -> None:
    with own(file, "returns", max_failed_fraction=0.0) as rewarder, pytest.raises(RewardError) as error:
        rewarder.score([group(kind)])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_was_begun_is_scored_while_nobody_waits(file: Path) -> None:
    groups = [group("a", index=1), group("bb", index=2)]
    with own(file, "slow", num_workers=2) as rewarder:
        start = time.perf_counter()
        for one in groups:
            rewarder.begin(one)
        assert time.perf_counter() - start < 0.4
        time.sleep(1.2)
        start = time.perf_counter()
        # The groups that are asked for are copies where calls cross processes.
        scores = rewarder.score([group("bb", index=2), group("a", index=1)])
        assert time.perf_counter() - start < 0.4
    assert [[score.total for score in row] for row in scores] == [[2.0], [1.0]]


def test_each_beginning_is_collected_once_and_what_was_not_begun_begins_late(file: Path) -> None:
    with own(file, "length") as rewarder:
        rewarder.begin(group("a"))
        rewarder.begin(group("a"))
        rewarder.begin(group("ccc", index=9))
        scores = rewarder.score([group("a"), group("bb"), group("a"), group("a")])
        assert [[score.total for score in row] for row in scores] == [[1.0], [2.0], [1.0], [1.0]]
        assert rewarder.score([group("ccc", index=9)])[0][0].total == 3.0
        assert not rewarder._begun


def test_processes_that_die_under_what_was_begun_are_replaced(file: Path) -> None:
    groups = [group("good", index=1), group("bad", "good", index=2), group("good", "good", index=3)]
    with own(file, "dies", num_workers=2, max_failed_fraction=0.5) as rewarder:
        for one in groups:
            rewarder.begin(one)
        time.sleep(0.5)
        assert [[s.failed for s in row] for row in rewarder.score(groups[1:])] == [[True, False], [False, False]]
        assert [[s.failed for s in row] for row in rewarder.score(groups[:1])] == [[False]]


def test_images_are_kept_as_long_as_somebody_scores_them(file: Path) -> None:
    left = sorted(Path(tempfile.gettempdir()).glob("vlmrl-rewards-*"))
    groups = [group("x", "y", media=(Picture(),), index=number) for number in range(3)]
    with own(file, "everything") as rewarder:
        for one in groups:
            rewarder.begin(one)
        assert [[s.total for s in row] for row in rewarder.score(groups)] == [[1.0, 1.0]] * 3
    assert sorted(Path(tempfile.gettempdir()).glob("vlmrl-rewards-*")) == left


def test_a_missing_label_is_said_when_the_group_begins_and_when_it_is_asked_for() -> None:
    with Rewarder(Reward(functions={"exact": 1.0})) as rewarder:
        for ask in (rewarder.begin, lambda one: rewarder.score([one])):
            with pytest.raises(RewardError, match=r"set data\.label_key"):
                ask(group("7", label=None))


def test_the_failures_of_what_is_asked_for_count_and_no_others(file: Path) -> None:
    bad, good = group("bad", "bad", index=1), group("good", "good", index=2)
    with own(file, "raises", max_failed_fraction=0.25) as rewarder:
        rewarder.begin(bad)
        rewarder.begin(good)
        assert [s.total for s in rewarder.score([good])[0]] == [1.0, 1.0]
        with pytest.raises(RewardError, match="scored none of the first 2 of 2 answers"):
            rewarder.score([bad])


def test_failures_count_against_the_whole_step_where_only_a_part_is_scored(file: Path) -> None:
    with own(file, "offline", max_failed_fraction=0.25) as rewarder:
        found = rewarder.score([group("bad", "good")], out_of=8)[0]
        assert [score.failed for score in found] == [True, False]
        with pytest.raises(RewardError, match="3 of 8 answers could not be scored"):
            rewarder.score([group("bad", "bad", "bad", "good")], out_of=8)
        rewarder.score([group("bad", "good")], out_of=8, failed=1)
        with pytest.raises(RewardError, match="3 of 8 answers"):
            rewarder.score([group("bad", "good")], out_of=8, failed=2)


def test_a_process_that_dies_while_nobody_waits_is_replaced(file: Path) -> None:
    with own(file, "dies_later") as rewarder:
        assert rewarder.score([group("x")])[0][0].total == 1.0
        time.sleep(0.6)
        assert rewarder.score([group("x")])[0][0].total == 1.0


def test_a_coroutine_is_not_a_number(file: Path) -> None:
    with own(file, "later") as rewarder, pytest.raises(RewardError, match="write def, not async def"):
        rewarder.score([group("x")])


def test_too_many_failures_of_the_infrastructure_stop_the_run_with_the_first_reason(file: Path) -> None:
    with own(file, "offline", max_failed_fraction=0.25) as rewarder:
        rewarder.score([group("good", "good", "good", "bad")])
        with pytest.raises(RewardError) as error:
            rewarder.score([group("good", "good", "bad", "bad")])
    assert str(error.value).startswith("2 of 4 answers could not be scored, more than reward.max_failed_fraction 0.25")
    assert "ConnectionRefusedError: nobody listens" in str(error.value)


def test_a_policy_that_breaks_its_reward_stops_no_run_and_a_reward_that_always_breaks_does(file: Path) -> None:
    with own(file, "raises", max_failed_fraction=0.0) as rewarder:
        found = rewarder.score([group("bad", "bad"), group("bad", "good")])
        assert [score.failure for scores in found for score in scores] == ["response"] * 3 + [None]
        rewarder.score([group("bad", "bad")], out_of=8)
        with pytest.raises(RewardError) as error:
            rewarder.score([group("bad", "bad"), group("bad")])
    line = FUNCTIONS.splitlines().index('        raise ValueError("cannot\\njudge this")') + 1
    assert str(error.value).startswith("raises of reward.remote_url scored none of the first 3 of 3 answers")
    assert "ValueError: cannot judge this" in str(error.value)
    assert f"my_reward.py:{line}), on shapes:17" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_too_hard_for_a_built_in_function_stops_no_run() -> None:
    reward = Reward(functions={"math": 1.0}, time_limit_s=0.5, max_failed_fraction=0.0)
    with Rewarder(reward) as rewarder:
        found = rewarder.score([group("\\boxed{9^{9^{9^9}}}", "\\boxed{9^{9^{9^8}}}")])[0]
    assert [score.failure for score in found] == ["response", "response"]


def test_a_function_that_always_hangs_stops_the_run_after_two_limits(file: Path) -> None:
    # 0.3 s for the first answer; 0.3 s for its second try and, side by side, for the second answer.
    said = (
        r"scored none of the first 2 of 80 answers.*longer than reward.time_limit_s 0\.3, also when tried again alone"
    )
    with own(file, "hangs", time_limit_s=0.3) as rewarder, pytest.raises(RewardError, match=said):
        rewarder.score([group(*["bad"] * 80)])


def test_a_function_that_returned_for_another_answer_does_not_always_hang(file: Path) -> None:
    with own(file, "hangs", time_limit_s=1.0, num_workers=4) as rewarder:
        scores = rewarder.score([group("bad", "bad", "good", "good")])[0]
    assert [score.failure for score in scores] == ["response", "response", None, None]


def test_what_a_reward_prints_lies_in_its_log_also_when_its_process_is_killed(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rewards.log"
    reward = Reward.model_validate({"functions": {}, "remote_url": f"{file}:talks"})
    with Rewarder(reward, log=log) as rewarder:
        rewarder.score([group("good", "bad")])
    lines = log.read_text().splitlines()
    assert lines == ["I see good", "natively", *["I see bad", "natively"] * 2]
    assert log.stat().st_mode & 0o111 == 0, "it is no program"


def test_each_failure_says_what_went_wrong(file: Path) -> None:
    with own(file, "raises", max_failed_fraction=0.5) as rewarder:
        good, bad = rewarder.score([group("good", "bad")])[0]
    assert good.problem is None
    assert str(bad.problem).startswith("ValueError: cannot judge this (")


def test_a_run_that_stops_before_all_are_seen_says_at_least(file: Path) -> None:
    with own(file, "offline", max_failed_fraction=0.1) as rewarder:
        with pytest.raises(RewardError, match=r"^at least 2 of 16 answers could not be scored"):
            rewarder.score([group(*["bad"] * 16)])
        with pytest.raises(RewardError, match=r"^1 of 1 answers"):
            rewarder.score([group("bad")])


def test_a_missing_label_names_the_row() -> None:
    said = "shapes:17 has no label, and the reward function exact"
    with Rewarder(Reward(functions={"exact": 1.0})) as rewarder, pytest.raises(RewardError, match=said):
        rewarder.score([group("7"), group("7", label=None)])
    with Rewarder(Reward(functions={"format": 1.0})) as rewarder:
        assert rewarder.score([group("\\boxed{7}", label=None)])[0][0].total == 1.0


@pytest.mark.parametrize("limit", [0.5, 10.0], ids=["the pool stops it", "it stops itself"])
def test_a_hostile_answer_is_worth_nothing_by_its_own_doing(limit: float) -> None:
    reward = Reward(functions={"math": 1.0}, time_limit_s=limit, max_failed_fraction=0.5)
    with Rewarder(reward) as rewarder:
        scores = rewarder.score([group("\\boxed{9^{9^{9^9}}}", "\\boxed{7}")])[0]
    assert [(s.total, s.failure, s.retried) for s in scores] == [(0.0, "response", "timeout"), (1.0, None, None)]


def test_a_built_in_scorer_that_is_killed_is_asked_again() -> None:
    # As the kernel does when memory ends. The comparison takes a second of work, and is killed in the middle of it.
    hard = "\\boxed{x^{900}+y}"
    with Rewarder(Reward(functions={"math": 1.0}, max_failed_fraction=0.0)) as rewarder:
        rewarder.score([group("\\boxed{7}")])
        (scorer,) = multiprocessing.active_children()
        before = _work(scorer.pid)
        rewarder.begin(group(hard))
        while _work(scorer.pid) < before + 0.1:
            time.sleep(0.01)
        os.kill(int(scorer.pid or 0), signal.SIGKILL)
        (score,) = rewarder.score([group(hard)])[0]
    assert (score.total, score.failure, score.retried) == (0.0, None, "death")


def test_a_failure_of_the_response_comes_before_one_of_the_infrastructure(file: Path) -> None:
    verdicts = {
        "a": Verdict(problem="gone", blame="infrastructure"),
        "b": Verdict(problem="broken", retried="death"),
        "c": Verdict(1.0),
    }
    weights = dict.fromkeys(verdicts, 1.0)
    assert combined(verdicts, weights) == Verdict(parts={"c": 1.0}, problem="broken", retried="death")
    verdicts["b"] = Verdict(2.0, retried="timeout")
    gone = combined(verdicts, weights)
    assert (gone.value, gone.failure, gone.problem, gone.retried) == (0.0, "infrastructure", "gone", "timeout")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("missing", "has no function missing"),
        ("elsewhere", "TRL's signature and asks for completion_ids"),
        ("asks", "asks for difficulty"),
        ("blind", "does not ask for response"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(file: Path, function: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        own(file, function)
    assert said in str(error.value)
    assert str(error.value).startswith("reward.remote_url: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("body", ["import nowhere", "def f(:", "raise RuntimeError('no')", "import sys; sys.exit(1)"])
def test_a_file_that_does_not_import_is_refused_at_the_start(tmp_path: Path, body: str) -> None:
    (tmp_path / "broken.py").write_text(body)
    with pytest.raises(ConfigError, match=r"reward\.remote_url: .*broken\.py does not import"):
        own(tmp_path / "broken.py", "f")


def test_a_file_that_ends_its_process_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(1)")
    with pytest.raises(ConfigError, match="ends its process when it is imported"):
        own(tmp_path / "deadly.py", "f")


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="your function is called math"):
        Rewarder(Reward(functions={"math": 1.0}, remote_url="x.py:math"))


def test_functions_are_checked_without_leaving_anything(file: Path) -> None:
    check_functions(Reward(remote_url=f"{file}:length"))
    with pytest.raises(ConfigError, match="has no function missing"):
        check_functions(Reward(remote_url=f"{file}:missing"))


def test_a_killed_run_leaves_no_scoring_process(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
            import multiprocessing, os, time
            from vlmrl.config.reward import Reward
            from vlmrl.rewards.rewarder import Rewarder
            if __name__ == "__main__":
                rewarder = Rewarder(Reward(functions={"exact": 1.0}, num_workers=2))
                server = multiprocessing.forkserver._forkserver._forkserver_pid
                print(server, *[child.pid for child in multiprocessing.active_children()], flush=True)
                time.sleep(60)
        """)
    )
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 3
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids)


def _work(pid: int | None) -> float:
    """Seconds that a process has used a processor."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _is_zombie(pid: int) -> bool:
    # Ended, but nobody has collected it yet: where tests run in a container, process 1 may never do so.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
