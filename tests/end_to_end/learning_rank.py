"""Script of one rank in test_learning*.py: run the tasks of a job and write their results."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from buffers_task import built, far
from ranks import end_together

from vlmrl.algorithms.losses import PolicyLoss
from vlmrl.config.actor import Model
from vlmrl.config.data import Columns
from vlmrl.config.ds import Ds
from vlmrl.config.lora import Lora
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.data.balance import spread
from vlmrl.data.experience import Experience
from vlmrl.data.media import InlineMedia
from vlmrl.data.packing import FILLER, Pack, make_pack
from vlmrl.types import Floats, Sample, Totals

SHARED = {"layout": "shared", "max_tokens": 10_000}
PACKED = {"layout": "packed", "max_tokens": 10_000}
PADDED = {"layout": "padded", "max_tokens": 1}
"""One sample per micro-batch."""


def policy(
    model: str,
    *,
    stage: int = 0,
    dtype: str = "fp32",
    offload: bool = False,
    loss: dict[str, Any] | None = None,
    cache_gib: float = 1.0,
    lora: dict[str, Any] | None = None,
    four_bit: bool = False,
    ema_beta: float | None = None,
    sequence: int = 1,
    experts: int = 1,
    place: str = "none",
    **actor: Any,
) -> Any:
    from vlmrl.learning.settings import PolicySettings

    # A large epsilon makes Adam's step follow the gradient; with a small one it is its sign, rounding noise included.
    adam = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}
    return PolicySettings(
        actor=Model.model_validate({"model_name_or_path": model, "adam": adam, "max_norm": 0.5} | actor),
        ds=Ds(
            zero_stage=stage,  # type: ignore[arg-type]
            param_dtype=dtype,  # type: ignore[arg-type]
            adam_offload=offload or place != "none",
            offload=place,  # type: ignore[arg-type]
            load_in_4bit=four_bit,
            sequence_parallel_size=sequence,
            expert_parallel_size=experts,
        ),
        loop=Loop(timeout_s=120),
        columns=Columns(),
        vision=Vision(cache_gib=cache_gib),
        total_steps=10,
        loss=PolicyLoss(**({"aggregation": "token", "max_tokens": 8} | (loss or {}))),
        temperature=0.7,
        bans=True,
        adapter=None if lora is None else plan(model, lora, actor),
        ema_beta=ema_beta,
    ).build()


def plan(model: str, lora: dict[str, Any], actor: dict[str, Any]) -> Any:
    from vlmrl.models.adapter_plan import plan_adapter
    from vlmrl.plugins import processor

    return plan_adapter(
        Model.model_validate({"model_name_or_path": model} | actor),
        Lora.model_validate({"rank": 4, "alpha": 8.0} | lora),
        processor(model, min_pixels=3136, max_pixels=100_000),
    )


def samples(tools: Any) -> list[Sample]:
    """Five groups of ragged samples, with no image, one and two; in one of them the policy has two turns."""
    rng = np.random.default_rng(0)
    rows = []
    for group, grids in enumerate([[], [(2, 2)], [(2, 3), (1, 2)], [], [(3, 2)]]):
        side = tools.resize_factor
        sizes = [(w * side, h * side) for w, h in grids] if side else []
        media = tuple(
            InlineMedia(f"{group}.{i}", size, rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))
            for i, size in enumerate(sizes)
        )
        text = tools.render("what is this? " * (1 + group % 2), num_images=len(media), columns=Columns())
        prompt, _ = tools.encode(text, sizes)
        for _ in range(2):
            length = int(rng.integers(2, 9))
            tokens = np.concatenate([prompt, rng.integers(97, 122, length)])
            sampled = np.arange(len(tokens)) >= len(prompt)
            if group == 4:
                sampled[len(prompt) + 1] = False
            rows.append(Sample(tokens.astype(np.int64), sampled, media, group, f"test:{group}"))
    return rows


def packs_of(
    learner: Any, rows: Sequence[Sample], layout: str, max_tokens: int, max_samples: int | None = None
) -> list[Pack]:
    tools = learner._processor
    group_size = learner._ds.sequence_parallel_size if hasattr(learner, "_ds") else 1  # frozen models have no groups
    shares = spread(
        rows,
        num_ranks=torch.distributed.get_world_size() // group_size,
        layout=layout,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        max_samples=max_samples,
        image_cost=lambda image: float(math.prod(tools.grid(image.size))),
        filler=tools.dummy_sample(),
    )
    return shares[torch.distributed.get_rank() // group_size]


def totals(rows: Sequence[Sample]) -> Totals:
    return Totals(num_tokens=int(sum(s.sampled.sum() for s in rows)), num_responses=len(rows))


def experience(pack: Pack, column: Callable[[int, int], Floats], *, kl_coef: float = 0.0) -> Experience:
    """`column(c, i)` is column c of sample i."""

    def rows(c: int) -> list[Floats]:
        blank = [np.zeros(len(s.tokens), dtype=np.float32) for s in pack.samples]
        return [column(c, i) if i >= 0 else blank[n] for n, i in enumerate(pack.ids)]

    return Experience(
        pack.samples,
        advantages=rows(0),
        old_logprobs=rows(1),
        rollout_logprobs=rows(3),
        ref_logprobs=rows(2),
        kl_coef=kl_coef,
    )


def weights(learner: Any, part: str = "whole") -> dict[str, np.ndarray]:
    from vlmrl.models.weight_buckets import digest, fingerprint, unpack_bucket

    tensors: dict[str, torch.Tensor] = {}
    # Small enough for many buckets, and for one tensor to exceed a bucket. Each bucket reuses the memory of the
    # previous one.
    for i in range(learner.begin_sync(30_000, part)):
        ticket = learner.share(i, i)
        assert (ticket is None) == (torch.distributed.get_rank() > 0)
        if ticket is not None:
            tensors |= {n: t.clone() for n, t in unpack_bucket(learner.bucket(ticket))}
    sent_fingerprint, num_bytes = learner.finish_sync()
    if tensors and part != "adapter":
        assert sent_fingerprint == fingerprint({n: digest(n, t) for n, t in tensors.items()})
        assert num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    return {n: t.float().numpy() for n, t in tensors.items()}


def score(out: Path, *, model: str) -> None:
    """Save log-probs under the initial weights; the experiences of all other tasks are made from them."""
    from vlmrl.learning.settings import ReferenceSettings

    learner = policy(model)
    rows = samples(learner._processor)
    arrays: dict[str, np.ndarray] = {}
    for name, cut in (("shared", SHARED), ("packed", PACKED), ("padded", PADDED)):
        for i, values in learner.logprobs(packs_of(learner, rows, **cut))[0]:
            arrays[f"{name}.{i}"] = values
    reference = ReferenceSettings(
        actor=Model(model_name_or_path=model),
        ds=Ds(param_dtype="fp32"),
        columns=Columns(),
        vision=Vision(),
        temperature=0.7,
        bans=True,
    ).build()
    # The second time, the features of a frozen tower are cached.
    for name, calls in (("reference", 4), ("again", 0)):
        scored, counts = reference.logprobs(packs_of(learner, rows, **SHARED))
        arrays |= {f"{name}.{i}": values for i, values in scored}
        assert counts["vision/tower_calls"].value == (calls if learner._processor.resize_factor else 0)
    np.savez(out.with_suffix(".npz"), **arrays)


def update(
    out: Path,
    *,
    model: str,
    old: str,
    cut: dict[str, Any],
    steps: int = 2,
    save: str | None = None,
    look: bool = False,
    warm: bool = False,
    prove: bool = False,
    kl_coef: float = 0.0,
    **settings: Any,
) -> None:
    """Take two optimizer steps; write weights and metrics to `out`, the model, or its average, to `save`.

    With `look`, after passes that an update would make and that are thrown away. With `warm`, after one in which rank 0
    has met all the images that it will meet again, and the others none of theirs. With `prove`, after passes in fp32
    and a comparison of layouts, whose figures go to a file beside `out`.
    """
    learner = policy(model, **settings)
    rows = samples(learner._processor)
    if look:
        quiet, _ = learner.logprobs(packs_of(learner, rows, **cut))
        record_call, _ = learner.logprobs(packs_of(learner, rows, **cut), gradient=True)
        for (i, mine), (n, other) in zip(quiet, record_call, strict=True):
            assert i == n
            np.testing.assert_allclose(mine, other, atol=2e-6)
    if warm:
        packs = packs_of(learner, rows, **cut)
        if torch.distributed.get_rank() > 0:
            packs = [make_pack([learner._processor.dummy_sample()], [FILLER], "shared")] * len(packs)
        learner.logprobs(packs)
    if prove:
        _prove(out, learner, rows, packs_of(learner, rows, **cut))
    metrics = _train(learner, old, cut, steps, kl_coef=kl_coef)
    _write(out, learner, metrics)
    if save:
        write = learner.save_model if learner._average is None else learner.save_average
        write(Path(save))


def _prove(out: Path, learner: Any, rows: Sequence[Sample], packs: Sequence[Pack]) -> None:
    rough, exact, again = (
        np.concatenate([row for _, row in learner.logprobs(packs, exact=each)[0]]) for each in (False, True, False)
    )
    np.testing.assert_array_equal(rough, again, "the weights are what they were")
    layouts = learner.compare_layouts(rows[2:6], ["packed", "shared"])
    assert bool(layouts) == (torch.distributed.get_rank() == 0)
    if layouts:
        figures = {"rounding": float(np.abs(rough - exact)[rough != 0].mean()), "layouts": layouts}
        Path(f"{out}_proof.json").write_text(json.dumps(figures))


def supervise(out: Path, *, model: str, cut: dict[str, Any], **settings: Any) -> None:
    learner = policy(model, **settings)
    rows = samples(learner._processor)
    packs = packs_of(learner, rows, **cut)
    _write(out, learner, [learner.fit(packs, totals(rows)) for _ in range(3)])


def adapt(
    out: Path,
    *,
    model: str,
    old: str,
    cut: dict[str, Any],
    steps: int = 2,
    save: str | None = None,
    **settings: Any,
) -> None:
    """Train an adapter; save log-probs with and without it before and after, its synced tensors, and its folder."""
    from vlmrl.observe.metrics import reduce

    learner = policy(model, **settings)
    rows = samples(learner._processor)
    packs = packs_of(learner, rows, **cut)
    parts = {f"{part} at first": weights(learner, part) for part in ("base", "whole")}
    indexed_logprobs = {"start": learner.logprobs(packs)[0], "start_off": learner.logprobs(packs, adapter=False)[0]}
    was_zero = learner.adapter_is_zero()
    metrics = _train(learner, old, cut, steps)
    indexed_logprobs["on"], counts = learner.logprobs(packs)
    indexed_logprobs["off"], others = learner.logprobs(packs, adapter=False)
    parts |= {part: weights(learner, part) for part in ("base", "whole", "adapter")}
    fingerprint, num_bytes = learner.finish_sync()
    zero = [was_zero, learner.adapter_is_zero()]
    if save:
        learner.save_model(Path(save))
    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, (indexed_logprobs, [*metrics, counts, others]))
    result = {"table": learner.table(), "cost": learner.traits()[0]}
    if torch.distributed.get_rank() == 0:
        for name, tensors in parts.items():
            np.savez(out.with_name(f"{out.name}.{name.replace(' ', '_')}.npz"), **tensors)
        rows_of = {f"{kind}.{i}": row for rank, _ in by_rank for kind, values in rank.items() for i, row in values}
        np.savez(out.with_name(f"{out.name}.logprobs.npz"), **rows_of)
        passes = [reduce([of_rank[i] for _, of_rank in by_rank]) for i in range(len(metrics) + 2)]
        result |= {"zero": zero, "fingerprint": fingerprint, "bytes": num_bytes, "passes": passes}
        out.with_suffix(".json").write_text(json.dumps(result, default=list))


def unbroken(out: Path, *, model: str, old: str, folder: str, **settings: Any) -> None:
    """Take two steps, write a checkpoint, and take two more."""
    learner = policy(model, **settings)
    _train(learner, old, SHARED, 2)
    _draw()
    learner.save_checkpoint(Path(folder), {"step": 2, "note": "é"})
    _train(learner, old, PADDED, 2)
    _write_state(out, learner, {})


def continued(out: Path, *, model: str, old: str, folder: str, **settings: Any) -> None:
    """Take the two further steps from the checkpoint."""
    learner = policy(model, **settings)
    _draw()
    extra = learner.load_checkpoint(Path(folder))
    _train(learner, old, PADDED, 2)
    _write_state(out, learner, extra)


def fails(out: Path, *, task: str, **arguments: Any) -> None:
    """Save the error message of another task."""
    from vlmrl.errors import VlmrlError

    try:
        TASKS[task](out, **arguments)
    except VlmrlError as error:
        out.with_suffix(".json").write_text(json.dumps([type(error).__name__, str(error)]))


def poisoned(out: Path, *, model: str, where: str, stage: int) -> None:
    """Take a third step whose loss, or only whose gradient, is NaN."""
    learner = policy(model, stage=stage)
    rows = samples(learner._processor)
    packs = packs_of(learner, rows, **PACKED)
    learner.fit(packs, totals(rows))
    learner.fit(packs, totals(rows))
    if where == "loss":
        learner.update(
            [[(p, experience(p, lambda c, i: np.full(len(rows[i].tokens), np.nan, "f")))] for p in packs],
            [totals(rows)],
        )
    parameter = next(p for p in learner._net.parameters() if p.requires_grad)
    parameter.register_hook(lambda g: g * float("nan"))
    learner.fit(packs, totals(rows))


def columns_of(old: str, rows: Sequence[Sample]) -> list[list[Floats]]:
    """Make advantages and log-probs of old policy, reference and engine, far enough from the current ones that some
    tokens are clipped or masked."""
    kept = np.load(old)
    rng = np.random.default_rng(1)
    advantages = [rng.normal(size=len(s.tokens)).astype(np.float32) for s in rows]
    near = [
        [kept[f"padded.{i}"] + rng.normal(scale=0.2, size=len(s.tokens)).astype(np.float32) for i, s in enumerate(rows)]
        for _ in range(3)
    ]
    return [advantages, *near]


def _train(learner: Any, old: str, cut: dict[str, Any], steps: int, *, kl_coef: float = 0.0) -> list[dict[str, Any]]:
    rows = samples(learner._processor)
    columns = columns_of(old, rows)
    packs = packs_of(learner, rows, **cut)
    work = [(p, experience(p, lambda c, i: columns[c][i], kl_coef=kl_coef)) for p in packs]
    return list(learner.update([work] * steps, [totals(rows)] * steps))


def _write(out: Path, learner: Any, metrics: Sequence[dict[str, Any]]) -> None:
    from vlmrl.observe.metrics import reduce

    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, metrics)
    tensors = weights(learner)
    if torch.distributed.get_rank() == 0:
        np.savez(out.with_suffix(".npz"), **tensors)
        of_groups = by_rank[:: learner._ds.sequence_parallel_size]
        steps = [reduce([rank[step] for rank in of_groups]) for step in range(len(metrics))]
        state = sum(
            t.numel() for s in learner._engine.optimizer.state.values() for t in s.values() if torch.is_tensor(t)
        )
        out.with_suffix(".json").write_text(
            json.dumps({"steps": steps, "table": learner.table(), "state": state}, default=list)
        )


def _write_state(out: Path, learner: Any, extra: dict[str, Any]) -> None:
    digest = {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in weights(learner).items()}
    state: dict[str, str] = {}
    _digest(learner._engine.optimizer.state_dict(), "", state)
    rates = learner._engine.get_lr()
    draws = [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002
    digests = {"weights": digest, "optimizer": state, "rates": rates, "draws": draws, "extra": extra}
    out.with_suffix(f".{torch.distributed.get_rank()}.json").write_text(json.dumps(digests))


def _digest(value: Any, name: str, into: dict[str, str]) -> None:
    if torch.is_tensor(value):
        into[name] = hashlib.sha256(value.detach().float().numpy().tobytes()).hexdigest()
    elif isinstance(value, dict):
        for key, inner in value.items():
            _digest(inner, f"{name}/{key}", into)
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            _digest(inner, f"{name}/{key}", into)


def _draw() -> None:
    random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002


TASKS = {f.__name__: f for f in (score, update, adapt, supervise, unbroken, continued, fails, poisoned, far, built)}


def main(job: str) -> None:
    torch.set_num_threads(1)
    for task in json.loads(Path(job).read_text()):
        TASKS[task["do"]](Path(task["out"]), **task["arguments"])
    end_together()


if __name__ == "__main__":
    main(sys.argv[1])
