"""Trackers get what they do not have, as plain data. Those whose packages are installed are tested offline as well."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from vlmrl.config.ckpt import Logger
from vlmrl.errors import ConfigError
from vlmrl.observe.report import RunReport
from vlmrl.observe.run_folder import RunFolder
from vlmrl.observe.sent import Sent
from vlmrl.observe.trackers import OnlyNew, Opening, _as_code, check_trackers, open_trackers

HOSTILE = "</script><img src=x onerror=alert(1)> ``` [x](javascript:y)"
SETTINGS = {"wandb": "project", "mlflow": "experiment", "trackio": "project", "swanlab": "project"}


def logger(package: str) -> Logger:
    return Logger.model_validate({package: {SETTINGS[package]: "p"}, "sample_steps": 2})


class FakeWandb:
    """Records the calls that it gets."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[str, dict[str, Any]]] = []
        self.failure: Exception | None = None
        self.ended: list[int] = []

    def init(self, **settings: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        self.runs.append(settings)
        return SimpleNamespace(log=self._log, finish=self._finish, define_metric=self._define)

    def _log(self, metrics: dict[str, Any]) -> None:
        if self.failure is not None:
            raise self.failure
        self.logged.append(metrics)

    def _finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)

    def _define(self, name: str, **options: Any) -> None:
        self.axes.append((name, options))

    class Table:
        def __init__(self, columns: list[str]) -> None:
            self.columns, self.data = columns, []

        def add_data(self, *row: Any) -> None:
            self.data.append(row)

    Image = staticmethod(lambda path: Path(path).name)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return fake


def write_transcripts(folder: Path) -> None:
    media = folder / "rollouts" / "media"
    media.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(media / "a.png")
    responses = [{"text": f"{HOSTILE} {i}", "score": float(i), "advantage": 0.5, "tokens": 7} for i in range(2)]
    line = json.dumps({"prompt": "How many?", "label": "3", "images": ["a"], "responses": responses})
    for name in ("step_000002", "eval_toy_step_000002"):
        (folder / "rollouts" / f"{name}.jsonl").write_text(line + "\n")


def run(folder: Path, package: str, *, done: int = 0, last: int = 3, error: BaseException | None = None) -> None:
    write_transcripts(folder)
    report = RunReport(RunFolder(folder), logger=logger(package), config={"a": {"b": 1}}, title="test")
    with report:
        report.begin(total_steps=last, done=done)
        if done:
            report.evaluation(done, {"eval/toy/pass@1": 0.25})
        for step in range(done + 1, last + 1):
            loss = math.nan if step == 1 else 0.1
            evaluation = {"eval/toy/pass@1": 0.5} if step == 2 else {}
            report.step(step, {"reward/mean": step / 4, "policy/loss": loss} | evaluation)
    report.finish(error)


@pytest.mark.parametrize("package", SETTINGS)
def test_a_missing_package_is_an_error_with_the_command_to_install_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^logger\.{package}\.\w+ is set, .*: pip install {package}, or unset it$"):
        check_trackers(logger(package))


@pytest.mark.parametrize("package", ["wandb", "swanlab"])
def test_a_key_is_needed_unless_the_tracker_is_offline(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, mode = f"{package.upper()}_API_KEY", f"{package.upper()}_MODE"
    monkeypatch.setitem(sys.modules, package, SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.delenv(key, raising=False)
    monkeypatch.delenv(mode, raising=False)
    with pytest.raises(ConfigError, match=f"environment variable {key} is not: set it or {mode}=offline"):
        check_trackers(logger(package))
    monkeypatch.setenv(mode, "offline")
    check_trackers(logger(package))
    check_trackers(Logger())


def test_an_error_of_a_tracker_never_shows_the_key(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.failure = RuntimeError("bad key\nsecret")
    with pytest.raises(ConfigError, match=r"^logger\.wandb: wandb refused the run: bad key \.\.\.$"):
        open_trackers(logger("wandb"), Opening(tmp_path, {}, resumes=False))


def test_wandb_gets_metrics_samples_and_the_step_as_axis(tmp_path: Path, wandb: FakeWandb) -> None:
    run(tmp_path, "wandb")
    plain = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in wandb.logged]
    assert plain[0] == {"step": 1, "reward/mean": 0.25}, "NaN is left out"
    assert plain[1] == {"step": 2, "reward/mean": 0.5, "policy/loss": 0.1, "eval/toy/pass@1": 0.5}
    assert [sorted(row) for row in plain[2:4]] == [
        [f"samples/{name}", f"samples/{name}/images", "step"] for name in ("train", "eval/toy")
    ]
    assert plain[2]["samples/train/images"] == ["a.png"], "an image that samples share is sent once"
    table = plain[2]["samples/train"]
    assert table.data[0] == (2, "How many?", "3", f"{HOSTILE} 1", 1.0, 0.5, 7, "a.png")
    assert ("*", {"step_metric": "step"}) in wandb.axes
    assert wandb.ended == [0]
    assert "secret" not in str(wandb.runs)


def test_a_resumed_run_is_the_same_wandb_run_and_sends_only_what_is_missing(tmp_path: Path, wandb: FakeWandb) -> None:
    def resumed(done: int, last: int) -> tuple[list[int], list[tuple[int, float]]]:
        wandb.logged.clear()
        run(tmp_path, "wandb", done=done, last=last)
        assert wandb.runs[0] == wandb.runs[-1]
        evaluations = [(row["step"], row["eval/toy/pass@1"]) for row in wandb.logged if "eval/toy/pass@1" in row]
        return [row["step"] for row in wandb.logged if "reward/mean" in row], evaluations

    run(tmp_path, "wandb")
    assert resumed(3, 3) == ([], [(3, 0.25)]), "the evaluation that a stop had interrupted is not lost"
    assert resumed(1, 2) == ([], []), "this one dies before it is where the first one was"
    assert resumed(1, 4) == ([4], []), "steps 2 and 3 keep their first values"
    assert not [row for row in wandb.logged if "samples/train" in row]
    run(tmp_path, "wandb")
    assert wandb.runs[0]["id"] != wandb.runs[-1]["id"], "a run that begins again is another one"


def test_a_tracker_that_fails_is_reported_once_and_does_not_end_the_run(
    tmp_path: Path, wandb: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    init = wandb.init

    def init_and_break(**settings: Any) -> Any:
        result = init(**settings)
        wandb.failure = ConnectionError("no route")
        return result

    wandb.init = init_and_break  # type: ignore[method-assign]
    run(tmp_path, "wandb", last=5)
    assert (
        capsys.readouterr().out.count("WandbTracker did not take the metrics of a step: ConnectionError: no route") == 1
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_only_new_and_finite_metrics_are_sent(tmp_path: Path) -> None:
    Sent(tmp_path / "sent.json", resumes=False).note(2, ["a/b", "eval/toy/reward"])
    got: list[Any] = []
    tracker = SimpleNamespace(write=lambda *row: got.append(row), write_samples=lambda *row: got.append(row[:2]))
    only_new = OnlyNew(tracker, Sent(tmp_path / "sent.json", resumes=True))  # type: ignore[arg-type]
    only_new.write(1, {"a/c": 1.0})
    only_new.write(2, {"a/b": 1.0, "a/c": 2.0})
    only_new.write(2, {"a/b": 1.0})
    only_new.write(3, {"a/b": math.inf, "a/c": 1.0})
    for name in ("train", "eval/toy"):
        only_new.write_samples(2, name, [])
    assert got == [(2, {"a/c": 2.0}), (3, {"a/c": 1.0}), (2, "train")]


@pytest.mark.parametrize(
    "text", [b"", b'{"step": 2', b"[]", b'{"step": 2}', b'{"step": "x", "metrics": []}', b"\xff\xfe"]
)
def test_a_file_of_what_was_sent_that_is_damaged_is_one_line(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "wandb_sent.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"wandb_sent\.json cannot be read: .*; delete it") as raised:
        Sent(file, resumes=True)
    assert "\n" not in str(raised.value)


def test_text_in_markdown_cannot_leave_its_code_block() -> None:
    assert _as_code("a ``` b ```` c") == "`````\na ``` b ```` c\n`````"


# ---- the packages, offline, where they are installed


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return iter(())


@pytest.mark.usefixtures("offline")
def test_real_wandb_takes_a_run_and_its_resume(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run(tmp_path / "run", "wandb")
    run(tmp_path / "run", "wandb", done=1, last=4)
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert any(b"javascript:y" in path.read_bytes() for path in (tmp_path / "run" / "wandb").rglob("*.table.json"))
    assert len(list((tmp_path / "run" / "wandb").rglob("*.png"))) >= 1


@pytest.mark.usefixtures("offline")
def test_real_mlflow_takes_a_run_and_its_resume(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    run(tmp_path / "run", "mlflow")
    run(tmp_path / "run", "mlflow", done=1, last=4)
    client, number = mlflow.MlflowClient(), (tmp_path / "run" / "mlflow_id").read_text().strip()
    history = {metric.step: metric.value for metric in client.get_metric_history(number, "reward/mean")}
    assert history == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    assert {m.step: m.value for m in client.get_metric_history(number, "eval/toy/pass_1")} == {2: 0.5}
    assert client.get_run(number).info.status == "FINISHED"
    run(tmp_path / "run", "mlflow", done=4, last=5, error=KeyboardInterrupt())
    assert client.get_run(number).info.status == "KILLED"
    names = [file.path for file in client.list_artifacts(number, "samples")]
    assert "samples/train_step_000002.json" in names
    assert "samples/images" in names


@pytest.mark.usefixtures("offline")
def test_real_trackio_takes_a_run_and_its_resume(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run(tmp_path / "run", "trackio")
    run(tmp_path / "run", "trackio", done=1, last=4)
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    logged = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert {name for name, _, _ in rows} == {"run"}
    assert [step for step, metrics in logged if "reward/mean" in metrics] == [1, 2, 3, 4]
    assert [step for step, metrics in logged if "eval/toy/pass@1" in metrics] == [2]
    (table,) = [metrics["samples/train"] for _, metrics in logged if "samples/train" in metrics]
    assert table["_value"][0]["response"].startswith("````\n</script>"), "its tables show Markdown"


@pytest.mark.usefixtures("offline")
def test_real_swanlab_takes_a_run_and_its_resume(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    run(tmp_path / "run", "swanlab")
    run(tmp_path / "run", "swanlab", done=1, last=4, error=RuntimeError("out of memory"))
    folders = list((tmp_path / "run" / "swanlog").glob("run-*"))
    assert len(folders) == 2
    assert any((folder / "media" / "image").exists() for folder in folders)
