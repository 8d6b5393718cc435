"""Which worker has died, and what is told of it: one line, whatever went wrong because of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from vlmrl.cluster import deaths
from vlmrl.cluster.deaths import Member, Roster, told_of
from vlmrl.errors import ClusterError, RewardError

RAYS = "The actor is dead because its worker process has died.\n" * 40
MEMORY = "most often memory is used up: lower "
OF_ENGINES = "--vllm.gpu_memory_utilization, or on CPU --vllm.cpu_kv_cache_gib"


class Workers:
    """What Ray would know: which workers are dead, and which are at work for the next hours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dead: dict[str, str] = {}
        self.busy: set[str] = set()
        self.away: dict[str, Exception] = {}
        self.asked = 0
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)

    def _wait(self, names: list[str], **how: Any) -> tuple[list[str], list[str]]:
        self.asked += 1
        done = [name for name in names if name not in self.busy][:1]
        return done, [name for name in names if name not in done]

    def _get(self, names: list[str]) -> None:
        if names[0] in self.dead:
            text = self.dead[names[0]]
            raise ray.exceptions.RayActorError(error_msg=text, actor_init_failed=text.startswith("Traceback"))
        if names[0] in self.away:
            raise self.away[names[0]]


class Process:
    def __init__(self, code: int | None) -> None:
        self._code = code
        self.is_closed = False

    def returncode(self, patience_s: float = 1.0) -> int | None:
        return self._code

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(deaths, "oom_kills", lambda: 2)
    return Workers(monkeypatch)


def roster(code: int | None = -9, *, role: str = "data", size: int = 1, log: Path | None = None, **how: Any) -> Roster:
    found = Roster(_killed_before=2)
    found.add("reward", Member("reward", 0, 1, "10.0.0.1", lambda: "reward"))
    process: Any = Process(code)
    found.add("it", Member(role, size - 1, size, "10.0.0.2", lambda: "it", process=process, log=log, **how))
    return found


@pytest.mark.parametrize(
    ("role", "size", "code", "line"),
    [
        ("data", 1, 3, "data on 10.0.0.2 ended with exit code 3; its last words are in the log"),
        ("actor", 4, -11, "actor 3 of 4 on 10.0.0.2 was killed by signal 11 (SIGSEGV); its last words are in the log"),
        (
            "data",
            1,
            -9,
            f"data on 10.0.0.2 was killed by signal 9 (SIGKILL); {MEMORY}--data.max_image_pixels or --data.max_pixels",
        ),
        (
            "vllm",
            2,
            None,
            f"vllm 1 of 2 on 10.0.0.2 ended without a message, as a killed process does; {MEMORY}{OF_ENGINES}",
        ),
    ],
)
def test_a_death_is_one_line_with_role_rank_machine_ending_and_setting(
    workers: Workers, role: str, size: int, code: int | None, line: str
) -> None:
    workers.dead["it"] = RAYS
    assert roster(code, role=role, size=size).why(0.1) == line


def test_out_of_memory_is_said_where_the_kernel_or_ray_says_so(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.dead["it"] = RAYS
    monkeypatch.setattr(deaths, "oom_kills", lambda: 3)
    said = "actor on 10.0.0.2 was killed by the kernel: out of memory; lower --train.max_tokens_per_gpu"
    assert str(roster(-9, role="actor").why(0.1)).startswith(said)
    assert "exit code 1" in str(roster(1, role="actor").why(0.1)), "the kernel killed something else"
    assert "out of memory" not in str(roster(-9, role="actor", is_here=False).why(0.1)), "that machine was not asked"
    workers.dead["it"] = "Task was killed due to the node running low on memory."
    assert "out of memory" in str(roster(None, role="actor", is_here=False).why(0.1))


def test_rays_own_word_is_taken_where_the_kernel_does_not_tell(workers: Workers, tmp_path: Path) -> None:
    workers.dead["it"] = "Worker exits with an exit code 7."
    assert "ended with exit code 7" in str(roster(None).why(0.1))
    log = tmp_path / "worker.err"
    log.write_text("Fatal Python error: Aborted\n")
    assert "signal 6 (SIGABRT)" in str(roster(None, log=log).why(0.1))


def test_the_first_death_is_told_again_and_who_is_ended_on_purpose_is_not_dead(workers: Workers) -> None:
    workers.dead["it"] = RAYS
    found = roster(3)
    process: Any = found.members["it"].process
    found.remove(["it", "unknown"])
    assert process.is_closed
    assert found.why(0.1) is None
    found = roster(3)
    line = found.why(0.1)
    asked = workers.asked
    found.remove(["it", "reward"])
    assert found.why(0.1) == line
    assert workers.asked == asked


def test_a_worker_at_work_is_not_dead(workers: Workers) -> None:
    workers.busy = {"it"}
    assert roster().why(0.05) is None
    workers.dead["reward"] = RAYS
    assert str(roster().why(0.05)).startswith("reward on 10.0.0.1 ")


def test_a_worker_that_cannot_be_reached_is_not_dead_and_one_that_never_was_is_told_elsewhere(workers: Workers) -> None:
    workers.away["it"] = ray.exceptions.ActorUnavailableError("gone for a moment", b"0" * 16)
    assert roster().why(0.05) is None
    workers.away["it"] = ray.exceptions.RuntimeEnvSetupError("no such package")
    assert roster().why(0.05) is None
    workers.dead["it"] = "Traceback (most recent call last):\n  many lines\nImportError: no module"
    assert roster().why(0.05) == "data on 10.0.0.2 could not start: ImportError: no module"


def test_rays_dump_and_the_last_words_go_where_people_need_not_look(workers: Workers, tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    workers.dead["it"] = RAYS
    found = roster(3, log=log)
    dumped: list[str] = []
    found.dump = dumped.append
    assert "\n" not in str(found.why(0.1))
    assert "line 999" in dumped[0]
    assert "line 100\n" not in dumped[0]
    assert RAYS in dumped[0]


def test_a_death_comes_in_place_of_what_went_wrong_because_of_it(workers: Workers) -> None:
    workers.dead["it"] = RAYS
    for error in (RuntimeError("connection reset by peer"), ClusterError("vllm did not answer within 600 s")):
        with pytest.raises(ClusterError, match="ended with exit code 3") as caught, told_of(roster(3)):
            raise error
        assert caught.value.__suppress_context__
    with pytest.raises(RewardError, match="mine"), told_of(roster(3)):
        raise RewardError("mine")
    workers.dead.clear()
    with pytest.raises(ZeroDivisionError), told_of(roster(3)):
        raise ZeroDivisionError
