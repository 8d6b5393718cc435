"""Script of one rank in test_four_bit.py: start DeepSpeed with a 4-bit base, take a step, and compare the base."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from ranks import end_together


def look(*, model: str, stage: int, dtype: str, storage: str = "auto") -> dict[str, Any]:
    """Return the number of changed tensors, the errors of base and merged weights, and the bytes that are held."""
    from vlmrl.config.actor import Model
    from vlmrl.config.data import Columns
    from vlmrl.config.ds import Ds
    from vlmrl.config.lora import Lora
    from vlmrl.learning.deepspeed_engine import device, seed, sharded_loading, start_engine
    from vlmrl.learning.forward import read_model
    from vlmrl.learning.weights import checkpoint_tensors, gathered, saved_tensors
    from vlmrl.models.adapter_plan import plan_adapter
    from vlmrl.models.adapters import delta, inject_adapter
    from vlmrl.models.load import freeze
    from vlmrl.models.quantize import is_four_bit
    from vlmrl.models.scorer import Scorer
    from vlmrl.models.weight_buckets import digest

    seed(1, deterministic=False)
    ds = Ds(zero_stage=stage, param_dtype=dtype, load_in_4bit=True, quant_storage=storage)  # type: ignore[arg-type]
    actor = Model.model_validate({"model_name_or_path": model, "adam": {"lr": 0.01}})
    before = _held()
    with sharded_loading(ds):
        net, tools = read_model(actor, ds=ds, columns=Columns(), where=device())
    base = _held() - before
    freeze(net, tools, vision=False, projector=False)
    plan = plan_adapter(actor, Lora(rank=2), tools)
    assert plan is not None
    inject_adapter(net, plan)
    for name, parameter in net.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tensors = saved_tensors(net)
    bits = {name: digest(name, tensor) for name, tensor in tensors if is_four_bit(tensor)}
    numbers = {name: tensor.clone() for name, tensor in checkpoint_tensors(net, tensors, merge=False)}
    engine = start_engine(Scorer(net).train(), actor=actor, ds=ds, total_steps=1)
    if storage != "auto":  # the first pass would end here
        changed = [name for name, tensor in saved_tensors(net) if name in bits and digest(name, tensor) != bits[name]]
        return {"changed": len(changed)}
    ids = torch.arange(5, 37)[None]
    inputs = {"input_ids": ids, "scored": ids > 5, "previous": torch.arange(31), "use_cache": False}
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(-engine(inputs).logprobs.sum())
    engine.step()

    tensors = saved_tensors(net)
    result: dict[str, Any] = {"bits": len(bits), "changed": 0, "base": 0.0, "merged": 0.0}
    for run in ([pair] for pair in tensors):
        with gathered(run, adapters_of=net):
            (name, tensor), (layer, _, _) = run[0], run[0][0].rpartition(".")
            result["changed"] += name in bits and digest(name, tensor) != bits[name]
            (_, whole), (kept, merged) = (
                checkpoint_tensors(net, run, merge=False)[0],
                checkpoint_tensors(net, run, merge=True)[0],
            )
            wanted = numbers[kept].float()
            if name.endswith(".weight") and layer in plan.targets:
                wanted = wanted + delta(net.get_submodule(layer))
            result["base"] = max(result["base"], float((whole - numbers[kept]).abs().max()))
            result["merged"] = max(result["merged"], float((merged.float() - wanted).abs().max()))
    del numbers, wanted, whole, merged, tensor, run
    trainable = sum(getattr(p, "ds_numel", p.numel()) for p in net.parameters() if p.requires_grad)
    return result | {"base_bytes": base, "held": _held() - before, "trainable": trainable}


def _held() -> int:
    """Return the bytes of all live tensors of this process, views counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # isinstance() on a lazy module would import it.
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    from vlmrl import startup

    startup.prepare()
    from vlmrl.learning.deepspeed_engine import init_distributed

    init_distributed(60)
    torch.set_num_threads(1)
    out, model = Path(sys.argv[1]), sys.argv[2]
    results = {name: look(model=model, **options) for name, options in json.loads(sys.argv[3]).items()}
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(results))
    end_together()
