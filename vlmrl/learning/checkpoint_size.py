"""Minimum size of a checkpoint, for a run that has none to measure yet. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds

_BYTES = {"bf16": 2, "fp32": 4}


def min_checkpoint_bytes(model: Model, ds: Ds, table: Sequence[tuple[str, int, int]]) -> int:
    """Sum the bytes of weights, fp32 copy and moments over all ranks. A checkpoint is larger, never smaller.

    Args:
        table: rows (part of the model, trainable parameters, all parameters), as `Policy.table` returns them.
    """
    trainable, total = sum(row[1] for row in table), sum(row[2] for row in table)
    # With adapters, only adapters are written. Stage 3 writes the weights only as the fp32 copy.
    weights = trainable if ds.lora.rank else total
    copy = 0 if ds.zero_stage == 0 and ds.param_dtype == "fp32" else 4
    moments = {"adam": 8, "adam_paged": 8, "muon": 4}.get(model.optim, 2)
    return (0 if ds.zero_stage == 3 else weights * _BYTES[ds.param_dtype]) + trainable * (copy + moments)
