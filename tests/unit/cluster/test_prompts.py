"""Rows that are drawn ahead: the same rows, and the state of those that were returned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlmrl.cluster.prompts import RemotePrompts
from vlmrl.cluster.remote_call import Call, record_call
from vlmrl.config.data import Data
from vlmrl.data.columns import RowRequirements
from vlmrl.data.source import Source
from vlmrl.errors import DataError, EndOfRowsError
from vlmrl.models.tiny import build
from vlmrl.types import Sample


class QueueGroup:
    """One worker: calls wait in a queue, and run in its order."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.queue: list[tuple[Call, list[Any]]] = []

    def submit(self, function: Callable[[Source], Any]) -> list[Any]:
        result: list[Any] = []
        self.queue.append((record_call(function), result))
        return [result]

    def wait(self, refs: list[Any]) -> list[Any]:
        while self.queue:
            call, result = self.queue.pop(0)
            result.append(getattr(self.source, call.method)(*call.args, **call.kwargs))
            if result is refs[0]:
                break
        return [ref[0] for ref in refs]

    def call(self, function: Callable[[Source], Any]) -> list[Any]:
        return self.wait(self.submit(function))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("qwen3", tmp_path_factory.mktemp("models") / "text", size="micro"))


def rows(
    model: str, said: list[str] | None = None, *, dataset: str = "arithmetic?size=12", epochs: int | None = None
) -> RemotePrompts:
    source = Source(
        model=model,
        trust_remote_code=False,
        data=Data(prompt_dataset=dataset, max_dropped_fraction=0.5),
        evaluation=None,
        seed=3,
        requirements=RowRequirements(answer=True),
        epochs=epochs,
    )
    group: Any = QueueGroup(source)
    return RemotePrompts(group, say=(said if said is not None else []).append)


def names(samples: list[Sample]) -> list[str]:
    return [sample.source for sample in samples]


def test_rows_drawn_ahead_are_the_same_and_are_not_part_of_the_state(model: str) -> None:
    first = rows(model)
    drawn = [names(first.draw_samples(4)[0]) for _ in range(2)]
    state = first.state()
    assert state["position"] == 8
    third = names(first.draw_samples(4)[0])
    second = rows(model)
    second.load_state(state)
    assert names(second.draw_samples(4)[0]) == third
    assert len({name for batch in (*drawn, third) for name in batch}) == 12
    first.load_state(state)  # the rows ahead of it are forgotten
    assert names(first.draw_samples(4)[0]) == third


def test_a_batch_of_another_size_begins_behind_the_rows_that_were_returned(model: str) -> None:
    one, other = rows(model), rows(model)
    drawn = [*names(one.draw_samples(3)[0]), *names(one.draw_samples(5)[0]), *names(one.draw_samples(4)[0])]
    assert drawn == names(other.draw_samples(12)[0])
    assert one.state() == other.state()


def test_a_dropped_row_is_reported_with_its_batch(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a", "answer": "b"}\n{"input": "c"}\n')
    said: list[str] = []
    prompts = rows(model, said, dataset=str(file))
    samples, metrics = prompts.draw_samples(2)
    assert (names(samples), metrics["data/rows_dropped"]) == (["rows:0", "rows:0"], 1.0)
    assert len(said) == 1
    assert "rows:1 dropped, no answer" in said[0]


def test_rows_dropped_behind_the_last_batch_are_reported(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = ['{"input": "a"}' if row == 2 else '{"input": "a", "answer": "b"}' for row in range(7)]
    file.write_text("\n".join(lines))
    said: list[str] = []
    prompts = rows(model, said, dataset=str(file), epochs=1)
    with pytest.raises(EndOfRowsError, match="1 of them are dropped"):
        prompts.draw_samples(7)
    assert [line.split(",")[0] for line in said] == ["row rows:2 dropped"]
    assert len(prompts.draw_samples(6)[0]) == 6
    assert len(said) == 1


def test_a_dropped_row_is_named_once_though_it_is_read_again(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a", "answer": "b"}\n{"input": "c"}\n')
    said: list[str] = []
    prompts = rows(model, said, dataset=str(file))
    before = prompts.state()
    for _ in range(2):
        assert prompts.draw_samples(2)[1]["data/rows_dropped"] == 1
        prompts.load_state(before)
    assert [line.split(",")[0] for line in said] == ["row rows:1 dropped"]


def test_the_rows_are_named_when_too_many_are_dropped(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a", "answer": "b"}\n' + '{"input": "a"}\n' * 3)
    said: list[str] = []
    with pytest.raises(DataError, match="3 of the first 4 rows cannot be used"):
        rows(model, said, dataset=str(file)).draw_samples(4)
    assert sorted(line.split(",")[0] for line in said) == [f"row rows:{row} dropped" for row in (1, 2, 3)]


def test_every_usable_row_is_drawn_once_per_epoch_though_batches_are_drawn_ahead(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = ['{"input": "a"}' if row in (1, 6) else '{"input": "a", "answer": "b"}' for row in range(9)]
    file.write_text("\n".join(lines))
    for stop in range(5):  # the run is resumed after so many batches
        prompts, drawn = rows(model, dataset=str(file), epochs=2), list[str]()
        for _ in range(stop):
            drawn += names(prompts.draw_samples(3)[0])
        state = prompts.state()
        prompts = rows(model, dataset=str(file), epochs=2)
        prompts.load_state(state)
        while True:
            try:
                drawn += names(prompts.draw_samples(3)[0])
            except EndOfRowsError as error:
                left_out = error.left_out
                break
        assert (left_out, prompts.state()["position"]) == (2, 12)
        drawn += names(prompts.draw_samples(2)[0])
        usable = {f"rows:{row}" for row in range(9)} - {"rows:1", "rows:6"}
        assert (set(drawn[:7]), set(drawn[7:]), len(drawn)) == (usable, usable, 14)
