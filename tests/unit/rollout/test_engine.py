"""What the engine makes of the workers' reports, and of calls out of turn. The rest needs vLLM: tests/end_to_end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.errors import ClusterError
from vlmrl.rollout.engine import RolloutEngine, problem_of


def report(*, digests: Any = (), ignored: Any = (), missing: Any = ()) -> dict[str, Any]:
    return {"digests": dict(digests), "ignored": list(ignored), "missing": list(missing)}


@pytest.mark.parametrize(
    ("reports", "problem"),
    [
        ([report(), report()], None),
        ([report(), report(ignored=["b", "a"])], "vLLM's model has no place for a, b"),
        ([report(missing=["e", "d", "c", "b", "a"])], "no weights came for a, b, c and 2 more"),
        ([report(digests={"a": "1"}), report(digests={"a": "2"})], "its workers received different weights"),
    ],
)
def test_an_update_is_good_only_when_every_worker_took_all_of_it(reports: list[Any], problem: str | None) -> None:
    assert problem_of(reports) == problem


def test_an_engine_that_was_not_started_says_so() -> None:
    engine = RolloutEngine(
        model="nowhere",
        vllm=Vllm(),
        columns=Columns(),
        trust_remote_code=False,
        dtype="fp32",
        max_model_len=8,
        top_p=1.0,
        name="engine-3",
    )
    with pytest.raises(ClusterError, match="rollout engine engine-3 is not running"):
        asyncio.run(engine.begin_update(1))
    asyncio.run(engine.shutdown())
    assert asyncio.run(engine.status())["version"] == 0
