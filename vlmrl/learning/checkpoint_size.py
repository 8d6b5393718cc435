"""The least that a first checkpoint takes of a disk, before there is one to measure. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds

_BYTES = {"bf16": 2, "fp32": 4}


def least_bytes(model: Model, ds: Ds, table: Sequence[tuple[str, int, int]]) -> int:
    """Bytes of weights, fp32 copy and moments, over all ranks; a checkpoint is larger, never smaller.

    Args:
        table: (part of the model, trainable parameters, all parameters), as the policy's ranks tell.
    """
    trainable, total = sum(row[1] for row in table), sum(row[2] for row in table)
    # With adapters these alone are written; in stage 3 weights are in the fp32 copy and nowhere else.
    weights = trainable if ds.lora.rank else total
    copy = 0 if ds.zero_stage == 0 and ds.param_dtype == "fp32" else 4
    moments = {"adam": 8, "adam_paged": 8, "muon": 4}.get(model.optim, 2)
    return (0 if ds.zero_stage == 3 else weights * _BYTES[ds.param_dtype]) + trainable * (copy + moments)
