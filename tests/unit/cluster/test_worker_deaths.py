"""Reports of dead workers: one line that replaces the errors that follow from the death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from vlmrl.cluster import worker_deaths
from vlmrl.cluster.worker_deaths import Member, Roster, report_deaths
from vlmrl.errors import ClusterError, EngineLossError, RewardError

RAY_ERROR = "The actor is dead because its worker process has died.\n" * 40
MEMORY = "memory may have run out: lower "
ENGINE_FLAGS = "--vllm.gpu_memory_utilization, or on CPU --vllm.cpu_kv_cache_gib"


class Workers:
    """Ray's knowledge of workers: which are dead, busy, or unreachable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dead: dict[str, str] = {}
        self.busy: set[str] = set()
        self.unreachable: dict[str, Exception] = {}
        self.num_waits = 0
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)

    def _wait(self, names: list[str], **options: Any) -> tuple[list[str], list[str]]:
        self.num_waits += 1
        done = [name for name in names if name not in self.busy][:1]
        return done, [name for name in names if name not in done]

    def _get(self, names: list[str]) -> None:
        if names[0] in self.dead:
            text = self.dead[names[0]]
            raise ray.exceptions.RayActorError(error_msg=text, actor_init_failed=text.startswith("Traceback"))
        if names[0] in self.unreachable:
            raise self.unreachable[names[0]]


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
    monkeypatch.setattr(worker_deaths, "oom_kills", lambda: 2)
    return Workers(monkeypatch)


def roster(
    code: int | None = -9, *, role: str = "data", size: int = 1, log: Path | None = None, **options: Any
) -> Roster:
    registered = Roster(_killed_before=2)
    registered.add("reward", Member("reward", 0, 1, "10.0.0.1", lambda: "reward"))
    process: Any = Process(code)
    registered.add("it", Member(role, size - 1, size, "10.0.0.2", lambda: "it", process=process, log=log, **options))
    return registered


@pytest.mark.parametrize(
    ("role", "size", "code", "line"),
    [
        ("data", 1, 3, "data on 10.0.0.2 ended with exit code 3; its last output is in the log"),
        ("actor", 4, -11, "actor 3 of 4 on 10.0.0.2 was killed by signal 11 (SIGSEGV); its last output is in the log"),
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
            f"vllm 1 of 2 on 10.0.0.2 ended without a message, as a killed process does; {MEMORY}{ENGINE_FLAGS}",
        ),
    ],
)
def test_a_death_is_one_line_with_role_rank_machine_exit_and_setting(
    workers: Workers, role: str, size: int, code: int | None, line: str
) -> None:
    workers.dead["it"] = RAY_ERROR
    assert roster(code, role=role, size=size).find_death(0.1) == line


def test_out_of_memory_is_reported_if_the_kernel_or_ray_reports_it(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.dead["it"] = RAY_ERROR
    monkeypatch.setattr(worker_deaths, "oom_kills", lambda: 3)
    line = "actor on 10.0.0.2 was killed by the kernel: out of memory; lower --train.max_tokens_per_gpu"
    assert str(roster(-9, role="actor").find_death(0.1)).startswith(line)
    assert "exit code 1" in str(roster(1, role="actor").find_death(0.1)), "the kernel killed another process"
    assert "out of memory" not in str(roster(-9, role="actor", is_here=False).find_death(0.1)), (
        "the kernel of another machine is not asked"
    )
    workers.dead["it"] = "Task was killed due to the node running low on memory."
    assert "out of memory" in str(roster(None, role="actor", is_here=False).find_death(0.1))


def test_the_exit_code_comes_from_ray_or_the_log_if_the_kernel_does_not_report_it(
    workers: Workers, tmp_path: Path
) -> None:
    workers.dead["it"] = "Worker exits with an exit code 7."
    assert "ended with exit code 7" in str(roster(None).find_death(0.1))
    log = tmp_path / "worker.err"
    log.write_text("Fatal Python error: Aborted\n")
    assert "signal 6 (SIGABRT)" in str(roster(None, log=log).find_death(0.1))


def test_the_first_death_is_kept_and_workers_stopped_on_purpose_are_not_dead(workers: Workers) -> None:
    workers.dead["it"] = RAY_ERROR
    registered = roster(3)
    process: Any = registered.members["it"].process
    registered.remove(["it", "unknown"])
    assert process.is_closed
    assert registered.find_death(0.1) is None
    registered = roster(3)
    line = registered.find_death(0.1)
    num_waits = workers.num_waits
    registered.remove(["it", "reward"])
    assert registered.find_death(0.1) == line
    assert workers.num_waits == num_waits


def test_a_busy_worker_is_not_dead(workers: Workers) -> None:
    workers.busy = {"it"}
    assert roster().find_death(0.05) is None
    workers.dead["reward"] = RAY_ERROR
    assert str(roster().find_death(0.05)).startswith("reward on 10.0.0.1 ")


def test_an_unreachable_worker_is_not_dead_and_a_failed_start_is_reported_elsewhere(workers: Workers) -> None:
    workers.unreachable["it"] = ray.exceptions.ActorUnavailableError("unreachable for a moment", b"0" * 16)
    assert roster().find_death(0.05) is None
    workers.unreachable["it"] = ray.exceptions.RuntimeEnvSetupError("no such package")
    assert roster().find_death(0.05) is None
    workers.dead["it"] = "Traceback (most recent call last):\n  many lines\nImportError: no module"
    assert roster().find_death(0.05) == "data on 10.0.0.2 could not start: ImportError: no module"


def test_rays_error_and_the_end_of_the_log_go_to_the_dump(workers: Workers, tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    workers.dead["it"] = RAY_ERROR
    registered = roster(3, log=log)
    dumped: list[str] = []
    registered.dump = dumped.append
    assert "\n" not in str(registered.find_death(0.1))
    assert "line 999" in dumped[0]
    assert "line 100\n" not in dumped[0]
    assert RAY_ERROR in dumped[0]


def test_a_death_replaces_the_errors_that_follow_from_it(workers: Workers) -> None:
    workers.dead["it"] = RAY_ERROR
    for error in (RuntimeError("connection reset by peer"), ClusterError("vllm did not respond within 600 s")):
        with pytest.raises(ClusterError, match="ended with exit code 3") as caught, report_deaths(roster(3)):
            raise error
        assert caught.value.__suppress_context__
    with pytest.raises(RewardError, match="mine"), report_deaths(roster(3)):
        raise RewardError("mine")
    loss = EngineLossError("engine 1 died; the steps before it are saved: resume from step_000004")
    with pytest.raises(EngineLossError, match="resume from step_000004"), report_deaths(roster(3)):
        raise loss
    workers.dead.clear()
    with pytest.raises(ZeroDivisionError), report_deaths(roster(3)):
        raise ZeroDivisionError
