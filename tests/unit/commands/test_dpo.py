"""The reference that is computed before training. Whole runs: end_to_end/test_dpo.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlmrl.commands.dpo import _precomputed
from vlmrl.commands.questions import questions_of
from vlmrl.commands.stage import StageRun
from vlmrl.config.load import load
from vlmrl.config.stages import DpoConfig
from vlmrl.data.judgements import Judged, mismatched
from vlmrl.data.pairs import Pairs
from vlmrl.errors import ConfigError, EndOfRowsError
from vlmrl.observe.run_folder import RunFolder
from vlmrl.types import Floats, Metrics, Prompt, Sample


def sample(number: int) -> Sample:
    tokens = np.array([number, 7, number])
    return Sample(tokens, np.array([False, False, True]), group=number // 2, response=number, source=f"toy:{number}")


class Rows:
    """Ten rows, drawn in order."""

    num_rows = 10

    def __init__(self, data: str = "toy") -> None:
        self.data = data
        self.position = 0
        self.num_draws = 0

    def _next(self, count: int) -> range:
        start, self.position = self.position, self.position + count
        self.num_draws += 1
        return range(start, self.position)

    def draw_pairs(self, count: int) -> tuple[Pairs, Metrics]:
        samples = [sample(2 * (row % 10) + place) for row in self._next(count) for place in (0, 1)]
        return Pairs(samples, np.zeros(count, dtype=np.float32)), {}

    def draw_judged(self, count: int) -> tuple[Judged, Metrics]:
        return Judged([sample(row % 10) for row in self._next(count)], np.arange(count) % 2 == 0), {}

    def state(self) -> dict[str, Any]:
        return {"data": self.data, "position": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Counted:
    """A model whose log-prob of a token is minus that token; it counts what it scores."""

    def __init__(self) -> None:
        self.scored: list[Sample] = []

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        self.scored += samples
        return [-sample.tokens.astype(np.float32) for sample in samples]


class Report:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def config(*words: str) -> DpoConfig:
    needed = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--dpo.precompute_reference"]
    return load(DpoConfig, [*needed, *words])


class Words:
    """A processor with a tokenizer."""

    resize_settings = ""

    def __init__(self, chat_template: str = "plain", **words: int) -> None:
        self.tokenizer = self
        self.chat_template, self._words = chat_template, words

    def get_vocab(self) -> dict[str, int]:
        return self._words


def compute(
    settings: DpoConfig, folder: Path, rows: Rows, model: Counted, *sets: Any, processor: Words | None = None
) -> Any:
    run: Any = StageRun(
        RunFolder(folder),
        processor or Words(),  # type: ignore[arg-type]
        None,
        None,  # type: ignore[arg-type]
        Report(),  # type: ignore[arg-type]
        rows,  # type: ignore[arg-type]
        rows.num_rows,
    )
    return _precomputed(settings, run, sets, model)


def test_every_row_of_the_run_is_scored_once_also_by_a_resumed_run(tmp_path: Path) -> None:
    settings = config("--train.batch_size", "4", "--train.max_epochs", "2")
    held_out = Pairs([sample(90), sample(91)], np.zeros(1, dtype=np.float32))
    rows, model = Rows(), Counted()
    cache = compute(settings, tmp_path, rows, model, held_out)
    # 20 rows of two epochs: 5 steps of 4. Ten pairs are distinct.
    assert len(model.scored) == 2 + 20
    assert rows.position == 0
    assert cache.values([sample(3), sample(91)]).tolist() == [-3.0, -91.0]
    again, other = Rows(), Counted()
    assert compute(settings, tmp_path, again, other, held_out).values([sample(3)]).tolist() == [-3.0]
    assert (other.scored, again.num_draws) == ([], 0)
    changed = Rows("another prompt")
    compute(settings, tmp_path, changed, other, held_out)
    assert changed.num_draws == 5, "other data are looked through"


def test_a_resumed_run_with_other_tokens_looks_through_its_rows_again(tmp_path: Path) -> None:
    first = Words(yes=1)
    compute(config("--train.batch_size", "5"), tmp_path, Rows(), Counted(), processor=first)
    for words, processor, num_draws in (
        ([], first, 0),
        (["--data.max_len", "9"], first, 2),
        (["--data.system_prompt", "Be brief."], first, 2),
        ([], Words(no=1), 2),
        ([], Words("with dates", yes=1), 2),
    ):
        rows = Rows()
        compute(config("--train.batch_size", "5", *words), tmp_path, rows, Counted(), processor=processor)
        assert rows.num_draws == num_draws, (words, processor.chat_template)


def test_a_run_that_is_resumed_with_smaller_batches_has_the_reference_of_all_its_rows(tmp_path: Path) -> None:
    class Many(Rows):
        num_rows = 100

        def draw_pairs(self, count: int) -> tuple[Pairs, Metrics]:
            samples = [sample(2 * row + place) for row in self._next(count) for place in (0, 1)]
            return Pairs(samples, np.zeros(count, dtype=np.float32)), {}

    compute(config("--train.batch_size", "8", "--train.max_steps", "3"), tmp_path, Many(), Counted())
    # Three steps of 8 are made: 9 more of 2 end with row 42.
    cache = compute(config("--train.batch_size", "2", "--train.max_steps", "12"), tmp_path, Many(), Counted())
    assert cache.missing([sample(number) for number in range(2 * 42)]) == []
    again = Many()
    compute(config("--train.batch_size", "2", "--train.max_steps", "12"), tmp_path, again, Counted())
    assert again.num_draws == 0


def test_a_reference_in_other_numbers_is_not_used(tmp_path: Path) -> None:
    compute(config("--ds.param_dtype", "fp32"), tmp_path, Rows(), Counted())
    with pytest.raises(ConfigError, match=r"computed with m \(fp32\), and .* is m \(bf16\)"):
        compute(config("--ds.param_dtype", "bf16"), tmp_path, Rows(), Counted())


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    class Dying(Counted):
        def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
            if self.scored:
                raise RuntimeError("killed")
            return super().logprobs(samples)

    settings = config("--train.batch_size", "5")
    with pytest.raises(RuntimeError, match="killed"):
        compute(settings, tmp_path, Rows(), Dying())
    model = Counted()
    compute(settings, tmp_path, Rows(), model)
    assert [row.tokens[0] for row in model.scored] == list(range(10, 20))


def test_rows_that_fill_no_batch_because_others_are_dropped_are_scored_too(tmp_path: Path) -> None:
    class Dropping(Rows):
        """Only seven of the rows are usable."""

        def _next(self, count: int) -> range:
            if self.position + count > 7:
                raise EndOfRowsError("")
            return super()._next(count)

    model = Counted()
    compute(config("--train.batch_size", "5"), tmp_path, Dropping(), model)
    assert [row.tokens[0] for row in model.scored] == list(range(14))


def test_kto_also_needs_responses_to_other_prompts(tmp_path: Path) -> None:
    settings = config("--train.batch_size", "5", "--dpo.loss", "kto")
    rows, model = Rows(), Counted()
    cache = compute(settings, tmp_path, rows, model)
    first = [sample(number) for number in range(5)]
    assert cache.missing([*first, *mismatched(first, max_len=9)]) == []
    assert len(model.scored) == 2 * (5 + 5)


def test_responses_are_compared_with_the_chosen_or_the_desirable_one() -> None:
    def row(label: str | None, answer: str) -> Prompt:
        tokens = np.array([1])
        return Prompt(index=0, source="toy:0", text="?", tokens=tokens, request=tokens, label=label, answer=answer)

    rows = [row(None, "3"), row("True", "4"), row("0", "5")]
    asked = questions_of(config(), rows)
    assert [(row.label, row.answer) for row in asked] == [(None, "3"), (None, "4")]
