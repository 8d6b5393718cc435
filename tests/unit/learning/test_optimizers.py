"""Optimizers, their parameter groups, and learning rates worked out by hand."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from vlmrl.config.actor import Model
from vlmrl.errors import ConfigError
from vlmrl.learning.optimizers import make_optimizer, make_schedule, parameter_groups, set_schedule_step
from vlmrl.models.load import load_model
from vlmrl.models.scorer import Scorer
from vlmrl.models.tiny import build
from vlmrl.models.value_head import ValueModel, value_net

CPU = torch.device("cpu")


def test_the_optimizer_has_the_settings_and_only_trainable_parameters() -> None:
    module = nn.Linear(2, 3)
    module.bias.requires_grad_(False)
    actor = Model.model_validate(
        {"model_name_or_path": "x", "adam": {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.2}}
    )
    (group,) = make_optimizer(module, actor=actor, where=CPU).param_groups
    assert [p is module.weight for p in group["params"]] == [True]
    assert [group[name] for name in ("lr", "betas", "eps", "weight_decay")] == [0.1, (0.5, 0.6), 1e-3, 0.2]


@pytest.mark.parametrize("name", ["adam_8bit", "adam_paged", "adam_8bit_paged"])
def test_optimizers_of_bitsandbytes_are_refused_on_cpu_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^optim {name} .* needs CUDA: use adam") as caught:
        make_optimizer(nn.Linear(2, 2), actor=Model(model_name_or_path="x", optim=name), where=CPU)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_paged", "bits"), [("adam_8bit", False, 8), ("adam_paged", True, 32), ("adam_8bit_paged", True, 8)]
)
def test_optimizers_of_bitsandbytes_match_their_names(name: str, is_paged: bool, bits: int) -> None:
    # Without state yet, it can be made without CUDA.
    actor = Model.model_validate({"model_name_or_path": "x", "optim": name, "adam": {"lr": 0.1, "weight_decay": 0.3}})
    optimizer = make_optimizer(nn.Linear(2, 2), actor=actor, where=torch.device("cuda"))
    assert (optimizer.is_paged, optimizer.args.optim_bits, optimizer.optimizer_name) == (is_paged, bits, "adam")
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 0.3), (0.1, 0.0)]


def _rates(total_steps: int, **actor: object) -> list[float]:
    model = Model.model_validate({"model_name_or_path": "x", "adam": {"lr": 1.0}} | actor)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_schedule(optimizer, actor=model, total_steps=total_steps)
    rates = []
    for _ in range(total_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_cosine_warms_up_and_falls_to_its_floor() -> None:
    rates = _rates(21, lr_warmup_ratio=0.05, min_lr_ratio=0.2)
    assert rates[:2] == [0.0, 1.0]
    # Half way down: 0.2 + 0.8 * (1 + cos(pi / 2)) / 2.
    assert rates[11] == pytest.approx(0.6)
    assert rates[20] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 19 / 20)) / 2)


def test_a_run_of_a_few_steps_has_no_warm_up_and_starts_at_the_peak() -> None:
    assert _rates(3, lr_scheduler="constant_with_warmup", lr_warmup_ratio=0.3) == [1.0, 1.0, 1.0]
    assert _rates(1)[0] == 1.0


@pytest.mark.parametrize(("name", "expected"), [("constant", [1.0] * 4), ("linear", [0.0, 1.0, 2 / 3, 1 / 3])])
def test_other_schedules_match_their_names(name: str, expected: list[float]) -> None:
    assert _rates(4, lr_scheduler=name, lr_warmup_ratio=0.25) == pytest.approx(expected)


def test_frozen_parameters_are_in_no_group_and_vectors_have_no_decay() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    module[0].weight.requires_grad_(False)
    matrices, vectors = parameter_groups(module, weight_decay=0.1)
    assert [p is module[2].weight for p in matrices["params"]] == [True]
    assert matrices["weight_decay"] == 0.1
    assert len(vectors["params"]) == 4
    assert vectors["weight_decay"] == 0.0


def _model(**actor: object) -> Model:
    adam = {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.2}
    return Model.model_validate({"model_name_or_path": "x", "optim": "muon", "adam": adam} | actor)


@pytest.fixture(scope="module")
def vision_language(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    folder = build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "vl", size="micro", tied=False)
    return Scorer(load_model(str(folder), dtype=torch.float32, attn_implementation="sdpa"))


def test_muon_gets_the_matrices_inside_the_layers_and_adam_the_rest(vision_language: nn.Module) -> None:
    names = {id(p): name for name, p in vision_language.named_parameters()}
    groups = make_optimizer(vision_language, actor=_model(), where=CPU).param_groups
    by_muon, matrices, vectors = ([names[id(p)] for p in group["params"]] for group in groups)
    assert sorted([*by_muon, *matrices, *vectors]) == sorted(names.values())
    # Two layers of seven; the tower's, and its merger's.
    text = [name for name in by_muon if ".language_model.layers." in name]
    assert len(text) == 14
    assert all(".visual." in name and (".blocks." in name or ".merger." in name) for name in set(by_muon) - set(text))
    assert sorted(name.rpartition(".visual.")[2] for name in matrices) == [
        "net.lm_head.weight",
        "net.model.language_model.embed_tokens.weight",
        "patch_embed.proj.weight",
    ]
    assert all(vision_language.get_parameter(name).ndim == 1 for name in vectors)
    assert [p.use_muon for p in vision_language.parameters()] == [n in by_muon for n in names.values()]


def test_muon_and_its_adam_have_separate_settings(vision_language: nn.Module) -> None:
    actor = _model(muon={"lr": 0.5, "momentum": 0.75})
    muon, matrices, vectors = make_optimizer(vision_language, actor=actor, where=CPU).param_groups
    assert [muon[name] for name in ("use_muon", "lr", "momentum", "weight_decay")] == [True, 0.5, 0.75, 0.2]
    for group, decay in ((matrices, 0.2), (vectors, 0.0)):
        assert [group[name] for name in ("use_muon", "lr", "betas", "eps")] == [False, 0.1, (0.5, 0.6), 1e-3]
        assert group["weight_decay"] == decay


def test_muon_leaves_the_value_head_to_adam(tmp_path: Path) -> None:
    path = str(build("qwen3", tmp_path / "model", size="micro"))
    net = value_net(path, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False, head_seed=1)
    critic = ValueModel(net)
    by_muon, matrices, _ = make_optimizer(critic, actor=_model(), where=CPU).param_groups
    assert len(by_muon["params"]) == 14
    names = {id(p): name for name, p in critic.named_parameters()}
    assert sorted(names[id(p)] for p in matrices["params"]) == ["net.model.embed_tokens.weight", "net.score.weight"]


def test_the_schedule_moves_the_rates_of_muon_and_its_adam(vision_language: nn.Module) -> None:
    actor = _model(muon={"lr": 0.5}, lr_scheduler="linear", lr_warmup_ratio=0.0)
    optimizer = make_optimizer(vision_language, actor=actor, where=CPU)
    scheduler = make_schedule(optimizer, actor=actor, total_steps=4)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.375, 0.075, 0.075])


def test_muon_steps_are_orthogonal_times_the_rate() -> None:
    class Net(PreTrainedModel):
        def __init__(self) -> None:
            super().__init__(PreTrainedConfig())
            self.inner = nn.Linear(4, 4, bias=False)

    net = Net()
    net.inner.weight.data.zero_()
    optimizer = make_optimizer(net, actor=_model(muon={"lr": 0.5}), where=CPU)
    net.inner.weight.grad = torch.tensor([[3.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, -2.0, 0], [0, 0, 0, 0.5]])
    optimizer.step()
    # Orthogonal, with the signs of the gradient, whatever its size: Newton-Schulz leaves values from 0.7 to 1.2.
    moved = -net.inner.weight.detach() / 0.5
    assert torch.equal(moved, moved.diag().diag())
    assert moved.diag().sign().tolist() == [1, 1, -1, 1]
    assert ((moved.diag().abs() > 0.6) & (moved.diag().abs() < 1.3)).all()


def test_muon_without_a_matrix_to_update_is_refused() -> None:
    class Net(PreTrainedModel):
        def __init__(self) -> None:
            super().__init__(PreTrainedConfig())
            self.table = nn.Embedding(3, 4)

    with pytest.raises(ConfigError, match="optim muon updates the matrices inside the layers, and none of them trains"):
        make_optimizer(Net(), actor=_model(), where=CPU)


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "linear", "constant", "constant_with_warmup"])
def test_a_schedule_can_be_moved_to_any_step(name: str) -> None:
    model = Model.model_validate({"model_name_or_path": "x", "lr_scheduler": name, "lr_warmup_ratio": 0.25})
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_schedule(optimizer, actor=model, total_steps=8)
    counted = []
    for _ in range(8):
        counted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    for step in (5, 2, 7, 0):
        set_schedule_step(scheduler, step)
        assert optimizer.param_groups[0]["lr"] == counted[step]
    set_schedule_step(scheduler, 0.5)
    # A quarter of the way up, between the first two steps.
    assert optimizer.param_groups[0]["lr"] == pytest.approx((counted[0] + counted[1]) / 2)
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1.5
