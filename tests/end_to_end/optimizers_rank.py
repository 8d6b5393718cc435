"""Script of one rank in test_optimizers_ranks.py: steps of Muon, and a moving average of the weights."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from ranks import end_together
from torch import Tensor

STEPS = 3
BETA = 0.75
FROZEN = "model.layers.0.mlp.up_proj.weight"


class Trained:
    """A model under DeepSpeed that is trained on sequences split over the ranks."""

    def __init__(self, *, model: str, stage: int, dtype: str, optim: str, offload: bool = False) -> None:
        from vlmrl.config.actor import Model
        from vlmrl.config.data import Columns
        from vlmrl.config.ds import Ds
        from vlmrl.learning.deepspeed_engine import device, seed, sharded_loading, start_engine
        from vlmrl.learning.forward import read_model
        from vlmrl.models.scorer import Scorer

        seed(1, deterministic=False)
        ds = Ds(zero_stage=stage, param_dtype=dtype, adam_offload=offload)  # type: ignore[arg-type]
        adam = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}
        actor = Model.model_validate(
            {"model_name_or_path": model, "adam": adam, "optim": optim, "muon": {"lr": 0.05}, "max_norm": 1.0}
        )
        with sharded_loading(ds):
            self.net, _ = read_model(actor, ds=ds, columns=Columns(), where=device())
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(name != FROZEN)
        self.engine = start_engine(Scorer(self.net).train(), actor=actor, ds=ds, total_steps=10)

    def step(self, number: int) -> None:
        rows = torch.arange(5, 37)[None] + number + torch.arange(2)[:, None] * 7
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        mine = rows[rank::ranks]
        for n, row in enumerate(mine):
            ids = row[None]
            inputs = {"input_ids": ids, "scored": ids > ids[:, :1], "previous": torch.arange(31), "use_cache": False}
            self.engine.set_gradient_accumulation_boundary(n == len(mine) - 1)
            self.engine.backward(-self.engine(inputs).logprobs.sum() * ranks / 62)
        self.engine.step()

    def weights(self) -> dict[str, Tensor]:
        """Return all saved weights, unsharded in fp32, the same on all ranks."""
        from vlmrl.learning.weights import gathered, saved_tensors

        tensors = saved_tensors(self.net)
        with gathered(tensors):
            return {name: tensor.detach().float().clone() for name, tensor in tensors}

    def trained(self) -> set[str]:
        return {name for name, parameter in self.net.named_parameters() if parameter.requires_grad}


def muon(folder: Path, **options: Any) -> None:
    """Save the weights after a few steps, and which of them Muon has updated."""
    learner = Trained(optim="muon", **options)
    moved = [name for name, p in learner.net.named_parameters() if p.requires_grad and p.use_muon]
    for number in range(STEPS):
        learner.step(number)
    weights = learner.weights()
    if torch.distributed.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")
        (folder / "moved.json").write_text(json.dumps(moved))


def resume(folder: Path, **options: Any) -> None:
    """Save the largest difference between a resumed and an uninterrupted run."""
    one = Trained(optim="muon", **options)
    one.step(0)
    one.engine.save_checkpoint(str(folder / "checkpoint"), tag="x")
    one.step(1)
    wanted = one.weights()
    other = Trained(optim="muon", **options)
    other.engine.load_checkpoint(str(folder / "checkpoint"), tag="x")
    other.step(1)
    resumed = other.weights()
    refused = [_planted(other.engine, folder, kind) for kind in ("model_states", "optim_states")]
    if torch.distributed.get_rank() == 0:
        worst = max(float((resumed[name] - wanted[name]).abs().max()) for name in wanted)
        ran = (folder / "ran").exists()
        (folder / "result.json").write_text(json.dumps({"worst": worst, "refused": refused, "ran": ran}))


class Payload:
    """An object that runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> Any:
        return open, (self._marker, "w")


def _planted(engine: Any, folder: Path, kind: str) -> str | None:
    """Return the error of loading a checkpoint with a payload in its files of a kind; None if it has no such file."""
    from vlmrl.errors import ConfigError
    from vlmrl.learning.safe_load import CLASSES, safe_load

    planted = folder / kind
    if torch.distributed.get_rank() == 0:
        shutil.copytree(folder / "checkpoint", planted)
        for file in planted.rglob(f"*{kind}.pt"):
            torch.save(safe_load(file, classes=CLASSES) | {"note": Payload(folder / "ran")}, file)
    torch.distributed.barrier()
    if not list(planted.rglob(f"*{kind}.pt")):
        return None
    try:
        engine.load_checkpoint(str(planted), tag="x")
    except ConfigError as error:
        return str(error)
    return "loaded"


def average(folder: Path, **options: Any) -> None:
    """Save the average's error, and the differences that a swap and a checkpoint leave."""
    from vlmrl.errors import ConfigError
    from vlmrl.learning.ema import Ema

    learner, twin = Trained(optim="adam", **options), Trained(optim="adam", **options)
    ema = Ema(learner.net, beta=BETA)
    wanted = start = before = twin.weights()
    for number in range(STEPS):
        learner.step(number)
        ema.update()
        twin.step(number)
        before = twin.weights()
        wanted = {name: BETA * wanted[name] + (1 - BETA) * now for name, now in before.items()}
    # The learner's weights are not read earlier: ZeRO-3 still holds some of them unsharded after its last step.
    with ema.swapped():
        inside = learner.weights()
    for one in (learner, twin):
        one.step(STEPS)
    with ema.swapped():
        pass
    after, unswapped = learner.weights(), twin.weights()
    trained = learner.trained()
    held = torch.tensor([sum(t.numel() for t in ema.state().values())])
    torch.distributed.all_reduce(held)

    checkpoint = folder / "average"
    checkpoint.mkdir(exist_ok=True)
    ema.save(checkpoint)
    fresh = Ema(learner.net, beta=BETA)
    fresh.load(checkpoint)
    refused = {}
    for name, what in {"lost": folder, "other": checkpoint}.items():
        try:
            with torch.no_grad():
                bare = Ema(torch.nn.Linear(2, 2) if name == "other" else learner.net, beta=BETA)
            bare.load(what)
        except ConfigError as error:
            refused[name] = str(error)
    result = {
        "error": _worst(inside, wanted),
        "frozen": _worst(inside, start, lambda name: name not in trained),
        "moved": _worst(before, start),
        "apart": _worst(inside, before),
        "left": _worst(after, unswapped),
        "resumed": max(float((fresh.state()[n] - t).abs().max()) for n, t in ema.state().items()),
        "held": int(held),
        "trained": sum(before[name].numel() for name in trained if name in before),
        "dtypes": sorted({str(t.dtype) for t in ema.state().values()}),
        "refused": refused,
    }
    if torch.distributed.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))


def _worst(one: dict[str, Tensor], two: dict[str, Tensor], where: Callable[[str], bool] = lambda _: True) -> float:
    return max((float((one[name] - two[name]).abs().max()) for name in one if where(name)), default=0.0)


if __name__ == "__main__":
    from vlmrl import startup

    startup.prepare()
    from vlmrl.learning.deepspeed_engine import init_distributed

    init_distributed(60)
    torch.set_num_threads(1)
    for out, what, options in json.loads(Path(sys.argv[1]).read_text()):
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        {"muon": muon, "resume": resume, "average": average}[what](folder, **options)
        torch.distributed.barrier()
    end_together()
