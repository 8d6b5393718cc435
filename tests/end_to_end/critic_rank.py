"""Script of one rank in test_learning_critic.py: gradients of losses, critics, pairs of policy and critic."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import learning_rank
import numpy as np
import torch
from learning_rank import columns_of, experience, packs_of, plan, policy, samples, totals, weights
from ranks import end_together

from vlmrl.algorithms.corrections import Correction
from vlmrl.algorithms.losses import PolicyLoss
from vlmrl.config.critic import Critic as CriticSection
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.experience import Experience
from vlmrl.data.packing import Pack
from vlmrl.errors import ConfigError
from vlmrl.learning.settings import CriticSettings, PolicyAndCriticSettings, PolicySettings
from vlmrl.types import Floats, Sample

KL_COEF = 0.1
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"dual_clip": 1.5, "entropy_coef": 0.05, "correction": ("tis", 0.9, 1.1)},
    "gspo": {"aggregation": "sequence", "clip_low": 0.03, "clip_high": 0.04, "correction": ("seq-mask-tis", 0.95, 1.1)},
    "cispo": {"correction": ("icepop", 0.8, 1.2)},
    "constant": {"kind": "ppo", "aggregation": "constant"},
}
CUTS: dict[str, dict[str, Any]] = {
    f"{layout}_{many}": {"layout": layout, "max_tokens": 10_000, "max_samples": most}
    for layout in ("padded", "packed", "shared")
    for many, most in (("one", None), ("many", 3))
}
"""On one rank: a single micro-batch, and four."""


def settings(model: str, *, stage: int = 0, lr: float = 0.01, **more: Any) -> CriticSettings:
    adam = {"lr": lr, "eps": 1e-3, "weight_decay": 0.01}
    whole = {
        "model_name_or_path": model,
        "adam": adam,
        "max_norm": 0.5,
        "zero_stage": stage,
        "gradient_checkpointing_enable": False,
        "freeze_visual_encoder": False,
        "freeze_projector": False,
    }
    return CriticSettings(
        critic=CriticSection.model_validate(whole | more),
        ds=Ds(param_dtype="fp32"),
        loop=Loop(timeout_s=120),
        columns=Columns(),
        vision=Vision(cache_gib=1.0),
        total_steps=10,
    )


def critic(
    model: str,
    *,
    lora: dict[str, Any] | None = None,
    dtype: str = "fp32",
    four_bit: bool = False,
    sequence: int = 1,
    experts: int = 1,
    **options: Any,
) -> Any:
    parallel = {"sequence_parallel_size": sequence, "expert_parallel_size": experts}
    ds = Ds(param_dtype=dtype, load_in_4bit=four_bit, **parallel)  # type: ignore[arg-type]
    adapter = None if lora is None else plan(model, lora, {})
    return replace(settings(model, **options), ds=ds, adapter=adapter).build()


def gradients(out: Path, *, model: str, old: str) -> None:
    """Save the gradient of every loss for every cut, summed over the ranks and flattened."""
    arrays: dict[str, np.ndarray] = {}
    learner = policy(model)
    # Outside of DeepSpeed's engine, which would accumulate them for a step.
    learner._forward._call = learner._forward._module
    for name, knobs in LOSSES.items():
        given = {"kind": name, "aggregation": "token", "max_tokens": 8, "kl_estimator": "k3"} | knobs
        if "correction" in given:
            given["correction"] = Correction(*given["correction"])
        learner._loss = PolicyLoss(**given)
        arrays |= {f"{name}.{cut}": _gradient(learner, learner._policy_loss, old, cut) for cut in CUTS}
    valued = critic(model)
    valued._forward._call = valued._forward._module
    arrays |= {f"value.{cut}": _gradient(valued, valued._value_loss, old, cut) for cut in CUTS}
    if torch.distributed.get_rank() == 0:
        np.savez(out.with_suffix(".npz"), **arrays)


def _gradient(learner: Any, loss: Any, old: str, cut: str) -> np.ndarray:
    rows = samples(learner._processor)
    trainable = [p for p in learner._net.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in trainable]
    for pack in packs_of(learner, rows, **CUTS[cut]):
        share, _ = loss(pack, _experience(learner, pack, rows, old), totals(rows))
        for held, one in zip(total, torch.autograd.grad(share, trainable, allow_unused=True), strict=True):
            if one is not None:
                held.add_(one)
    flat = torch.cat([one.flatten() for one in total])
    torch.distributed.all_reduce(flat)
    return flat.numpy()


def _experience(learner: Any, pack: Pack, rows: list[Sample], old: str) -> Experience:
    """Make old values near the current ones, and returns far from them."""
    columns = columns_of(old, rows)
    rng = np.random.default_rng(2)
    values = [rng.normal(scale=0.3, size=len(s.tokens)).astype(np.float32) for s in rows]
    returns = [rng.normal(size=len(s.tokens)).astype(np.float32) + 1 for s in rows]
    whole = experience(pack, lambda c, i: columns[c][i], kl_coef=KL_COEF)

    def laid(column: list[Floats]) -> list[Floats]:
        return [
            column[i] if i >= 0 else np.zeros(len(s.tokens), "f") for i, s in zip(pack.ids, pack.samples, strict=True)
        ]

    return Experience(
        **{name: getattr(whole, name) for name in ("samples", "advantages", "old_logprobs", "rollout_logprobs")},
        ref_logprobs=whole.ref_logprobs,
        kl_coef=KL_COEF,
        values=laid(values),
        returns=laid(returns),
    )


def _work(learner: Any, old: str, cut: str, steps: int) -> tuple[list[Any], list[Any]]:
    rows = samples(learner._processor)
    packs = packs_of(learner, rows, **CUTS[cut])
    work = [(pack, _experience(learner, pack, rows, old)) for pack in packs]
    return [work] * steps, [totals(rows)] * steps


def stop(out: Path, *, model: str, old: str, bound: float | None) -> None:
    """Count how many of two steps are taken before the KL bound stops the update."""
    learner = policy(model, loss={"kl_early_stop": bound}, stage=2)
    steps, total = _work(learner, old, "shared_one", 2)
    logprobs = dict(learner.logprobs([pack for pack, _ in steps[0]])[0])
    fresh = []
    for pack, given in steps[0]:
        held = zip(pack.ids, pack.samples, strict=True)
        old_logprobs = [logprobs[i] if i >= 0 else np.zeros(len(s.tokens), "f") for i, s in held]
        fresh.append((pack, replace(given, old_logprobs=old_logprobs)))
    _write(out, {}, learner.update([fresh] * 2, total), {})


def retuned(out: Path, *, model: str, old: str, stage: int, dtype: str = "fp32") -> None:
    """Resume a policy from a checkpoint with other optimizer settings."""
    schedule = {"lr_scheduler": "linear", "lr_warmup_ratio": 0.0}
    learner = policy(model, stage=stage, dtype=dtype, **schedule)
    learner.update(*_work(learner, old, "shared_one", 2))
    folder = out.with_name(f"{out.name}_checkpoint")
    learner.save_checkpoint(folder, {})
    adam = {"lr": 0.001, "eps": 1e-2, "weight_decay": 0.5, "betas": (0.5, 0.75)}
    other = policy(model, stage=stage, dtype=dtype, adam=adam, max_norm=0.25, **schedule)
    other.load_checkpoint(folder)
    groups = [{n: group[n] for n in ("eps", "betas", "weight_decay")} for group in other._engine.optimizer.param_groups]
    metrics = other.update(*_work(other, old, "shared_one", 2))
    refused = ""
    try:
        policy(model, stage=stage, dtype=dtype, optim="muon").load_checkpoint(folder)
    except ConfigError as error:
        refused = str(error)
    clip = getattr(other._engine.optimizer, "clip_grad", None)
    _write(out, {}, metrics, {"groups": groups, "clip": clip, "refused": refused})


def average(out: Path, *, model: str, old: str, stage: int, lora: dict[str, Any] | None = None) -> None:
    """Save the initial weights, those after each of two steps, and their moving average, also from a policy that
    resumes from a checkpoint."""
    learner = policy(model, stage=stage, lora=lora, ema_beta=0.75)
    part = "whole" if lora is None else "adapter"
    held = [weights(learner, part)]
    for _ in range(2):
        learner.update(*_work(learner, old, "shared_one", 1))
        held.append(weights(learner, part))
    learner.save_average(out.with_name(f"{out.name}_saved"))
    now = weights(learner, part)
    assert all(np.array_equal(held[-1][name], now[name]) for name in now)
    folder = out.with_name(f"{out.name}_checkpoint")
    learner.save_checkpoint(folder, {})
    other = policy(model, stage=stage, lora=lora, ema_beta=0.75)
    other.load_checkpoint(folder)
    other.save_average(out.with_name(f"{out.name}_again"))
    plain = policy(model, stage=stage, lora=lora)
    plain.load_checkpoint(folder)
    plain.save_checkpoint(folder, {})
    refused = ""
    try:
        other.load_checkpoint(folder)
    except ConfigError as error:
        refused = str(error)
    tensors = {f"{n}.{name}": tensor for n, state in enumerate(held) for name, tensor in state.items()}
    _write(out, tensors, [], {"refused": refused})


def value(
    out: Path,
    *,
    model: str,
    old: str,
    cut: str,
    steps: int = 2,
    save: str | None = None,
    again: str | None = None,
    **options: Any,
) -> None:
    """Train a critic; save its values before and after, its weights and its metrics. With `again`, also write a
    checkpoint, and compare two further steps with those of a critic that resumes from it."""
    learner = critic(model, **options)
    packs = packs_of(learner, samples(learner._processor), **CUTS[cut])
    before, _ = learner.values(packs)
    metrics = learner.update_values(*_work(learner, old, cut, steps))
    after, _ = learner.values(packs)
    if save:
        learner.save_critic(Path(save))
    if again:
        learner.save_critic_checkpoint(Path(again))
        learner.update_values(*_work(learner, old, cut, 2))
        other = critic(model, **options)
        other.load_critic_checkpoint(Path(again))
        other.update_values(*_work(other, old, cut, 2))
        one, two = _weights(learner), _weights(other)
        assert all(np.array_equal(one[name], two[name]) for name in one), "a continued critic is another"
        return
    rows = {f"{kind}.{i}": row for kind, indexed in (("before", before), ("after", after)) for i, row in indexed}
    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, rows)
    np.savez(out.with_name(f"{out.name}.values.npz"), **{name: row for rank in by_rank for name, row in rank.items()})
    _write(out, _weights(learner), metrics, {"table": learner.critic_table()})


def pair(
    out: Path, *, model: str, other: str, old: str, cut: str, stage: int = 0, critic_stage: int = 0, **frozen: bool
) -> None:
    """Train a policy and a critic in one process; save how often the towers ran for log-probs, values and steps."""
    from vlmrl.observe.metrics import reduce

    given = settings(other, stage=critic_stage, **frozen)
    both = PolicyAndCriticSettings(policy=_policy_settings(model, stage, frozen), critic=given).build()
    packs = packs_of(both, samples(both._processor), **CUTS[cut])
    counts = [both.logprobs(packs)[1], both.values(packs)[1]]
    steps = both.update(*_work(both, old, cut, 1)) + both.update_values(*_work(both, old, cut, 1))
    shares = both.shares_features()
    folder = out.with_name(f"{out.name}_checkpoint")
    both.save_checkpoint(folder / "actor", {"step": 1})
    both.save_critic_checkpoint(folder / "critic")
    both.release()
    held = _weights(both), _weights(both._critic)
    both.update(*_work(both, old, cut, 1))
    both.update_values(*_work(both, old, cut, 1))
    both.load_checkpoint(folder / "actor")
    both.load_critic_checkpoint(folder / "critic")
    assert both.shares_features() == shares
    back = _weights(both), _weights(both._critic)
    assert all(np.array_equal(was[name], now[name]) for was, now in zip(held, back, strict=True) for name in was)
    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, [*counts, *steps])
    towers = [reduce([of_rank[i] for of_rank in by_rank])["vision/tower_calls"] for i in range(len(by_rank[0]))]
    both_held = {f"policy.{n}": t for n, t in held[0].items()} | {f"critic.{n}": t for n, t in held[1].items()}
    _write(out, both_held, steps, {"towers": towers, "shares": shares})


def _policy_settings(model: str, stage: int, frozen: dict[str, bool]) -> PolicySettings:
    from vlmrl.config.actor import Model

    adam = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}
    return PolicySettings(
        actor=Model.model_validate({"model_name_or_path": model, "adam": adam, "max_norm": 0.5} | frozen),
        ds=Ds(zero_stage=stage, param_dtype="fp32"),  # type: ignore[arg-type]
        loop=Loop(timeout_s=120),
        columns=Columns(),
        vision=Vision(cache_gib=1.0),
        total_steps=10,
        loss=PolicyLoss(aggregation="token", max_tokens=8),
        temperature=0.7,
        bans=True,
    )


def _weights(learner: Any) -> dict[str, np.ndarray]:
    """Return the weights under their checkpoint names, on rank 0."""
    from vlmrl.learning.weights import checkpoint_names, saved_tensors, whole_tensors

    tensors = list(whole_tensors(learner._net, saved_tensors(learner._net), max_bytes=1 << 30))
    return {
        n: t.float().detach().numpy().copy() for n, t in (checkpoint_names(learner._net, tensors) if tensors else [])
    }


def _write(out: Path, tensors: dict[str, np.ndarray], metrics: list[dict[str, Any]], more: dict[str, Any]) -> None:
    from vlmrl.observe.metrics import reduce

    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, metrics)
    if torch.distributed.get_rank() == 0:
        np.savez(out.with_suffix(".npz"), **tensors)
        steps = [reduce([rank[step] for rank in by_rank]) for step in range(len(metrics))]
        out.with_suffix(".json").write_text(json.dumps({"steps": steps} | more, default=list))


TASKS = {f.__name__: f for f in (gradients, stop, average, retuned, value, pair)}


def main(job: str) -> None:
    torch.set_num_threads(1)
    for task in json.loads(Path(job).read_text()):
        (TASKS | learning_rank.TASKS)[task["do"]](Path(task["out"]), **task["arguments"])
    end_together()


if __name__ == "__main__":
    main(sys.argv[1])
