"""Optimizers, what they do to which weights, and learning rates worked out by hand."""

import math

import pytest
import torch
from torch import nn

from vlmrl.config.actor import Model
from vlmrl.errors import ConfigError
from vlmrl.learning.optimizers import optimizer, parameter_groups, schedule

CPU = torch.device("cpu")


def test_the_optimizer_has_the_settings_and_only_what_trains() -> None:
    module = nn.Linear(2, 3)
    module.bias.requires_grad_(False)
    actor = Model.model_validate(
        {"model_name_or_path": "x", "adam": {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.2}}
    )
    (group,) = optimizer(module, actor=actor, where=CPU).param_groups
    assert [p is module.weight for p in group["params"]] == [True]
    assert [group[name] for name in ("lr", "betas", "eps", "weight_decay")] == [0.1, (0.5, 0.6), 1e-3, 0.2]


@pytest.mark.parametrize("name", ["adam_8bit", "adam_paged", "adam_8bit_paged"])
def test_optimizers_of_bitsandbytes_are_refused_on_cpu_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"actor.optim {name} .* needs CUDA: use adam") as caught:
        optimizer(nn.Linear(2, 2), actor=Model(model_name_or_path="x", optim=name), where=CPU)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_paged", "bits"), [("adam_8bit", False, 8), ("adam_paged", True, 32), ("adam_8bit_paged", True, 8)]
)
def test_optimizers_of_bitsandbytes_are_what_their_names_say(name: str, is_paged: bool, bits: int) -> None:
    # It holds no state yet, so that it can be made where it could not step.
    actor = Model.model_validate({"model_name_or_path": "x", "optim": name, "adam": {"lr": 0.1, "weight_decay": 0.3}})
    found = optimizer(nn.Linear(2, 2), actor=actor, where=torch.device("cuda"))
    assert (found.is_paged, found.args.optim_bits, found.optimizer_name) == (is_paged, bits, "adam")
    assert [(group["lr"], group["weight_decay"]) for group in found.param_groups] == [(0.1, 0.3), (0.1, 0.0)]


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
