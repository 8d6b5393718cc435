import math

import pytest
import torch
from torch import nn

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.errors import ConfigError
from vlmrl.learning.engine import parameter_groups, schedule, settings


def _rates(total_steps: int, **actor: object) -> list[float]:
    model = Model.model_validate({"model_name_or_path": "x", "adam": {"lr": 1.0}} | actor)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, actor=model, total_steps=total_steps)
    rates = []
    for _ in range(total_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_cosine_rises_over_the_warm_up_and_falls_to_its_floor() -> None:
    rates = _rates(21, lr_warmup_ratio=0.05, min_lr_ratio=0.2)
    assert rates[:2] == [0.0, 1.0]
    # Half way down: 0.2 + 0.8 * (1 + cos(pi / 2)) / 2.
    assert rates[11] == pytest.approx(0.6)
    assert rates[20] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 19 / 20)) / 2)


def test_a_run_of_a_few_steps_has_no_warm_up_and_starts_at_the_peak() -> None:
    assert _rates(3, lr_scheduler="constant_with_warmup", lr_warmup_ratio=0.3) == [1.0, 1.0, 1.0]
    assert _rates(1)[0] == 1.0


@pytest.mark.parametrize(("name", "expected"), [("constant", [1.0] * 4), ("linear", [0.0, 1.0, 2 / 3, 1 / 3])])
def test_the_other_schedules_are_what_their_names_say(name: str, expected: list[float]) -> None:
    assert _rates(4, lr_scheduler=name, lr_warmup_ratio=0.25) == pytest.approx(expected)


def test_frozen_parameters_have_no_optimizer_state_and_vectors_no_decay() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    module[0].weight.requires_grad_(False)
    matrices, vectors = parameter_groups(module, weight_decay=0.1)
    assert [p is module[2].weight for p in matrices["params"]] == [True]
    assert matrices["weight_decay"] == 0.1
    assert len(vectors["params"]) == 4
    assert vectors["weight_decay"] == 0.0


def test_clipping_has_one_owner() -> None:
    module, actor = nn.Linear(2, 2), Model(model_name_or_path="x", max_norm=0.5)
    plain = settings(module, actor=actor, ds=Ds(zero_stage=0, param_dtype="fp32"))
    sharded = settings(module, actor=actor, ds=Ds(zero_stage=2, param_dtype="fp32"))
    assert (plain["gradient_clipping"], sharded["gradient_clipping"]) == (0.0, 0.5)


def test_bf16_accumulates_in_fp32() -> None:
    config = settings(nn.Linear(2, 2), actor=Model(model_name_or_path="x"), ds=Ds(param_dtype="bf16"))
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_offload_without_a_sharded_optimizer_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"ds\.adam_offload needs .* ds\.zero_stage"):
        settings(nn.Linear(2, 2), actor=Model(model_name_or_path="x"), ds=Ds(zero_stage=0, adam_offload=True))
