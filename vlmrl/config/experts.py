"""Experts that are spread over the ranks: what the settings rule out."""

from collections.abc import Mapping

from vlmrl.config.ds import Ds


def conflicts_of_experts(
    ds: Ds, num_ranks: Mapping[str, int], zero_stages: Mapping[str, tuple[int | None, str]]
) -> list[str]:
    """`num_ranks`: for each trained model, the settings of its ranks -> their number; `zero_stages`: the setting of its
    ZeRO stage -> that stage, and the optimizer."""
    flag, size = f"ds.expert_parallel_size {ds.expert_parallel_size}", ds.expert_parallel_size
    if size == 1:
        return []
    conflicts = [
        f"{flag} does not divide the {number} rank{'s' if number > 1 else ''} of {flags}: use a multiple of {size} "
        "ranks"
        for flags, number in num_ranks.items()
        if number % size
    ]
    for setting, (stage, optim) in zero_stages.items():
        if stage == 0:
            conflicts.append(f"{flag} needs {setting} 1, 2 or 3: with 0 nobody adds up gradients of other groups")
        if optim != "adam":
            role = "actor" if setting == "ds.zero_stage" else "critic"
            conflicts.append(f"{flag} is not built yet for {role}.optim {optim}: use adam")
    if ds.lora.rank:
        conflicts.append(
            f"{flag} spreads trained experts, and with ds.lora.rank they are frozen: leave one of them out"
        )
    if ds.sequence_parallel_size > 1:
        conflicts.append(
            f"{flag} is not built yet for ds.sequence_parallel_size {ds.sequence_parallel_size}: leave one of them out"
        )
    for name in ("adam_offload", "enable_sleep"):
        if getattr(ds, name):
            conflicts.append(f"{flag} is not built yet for ds.{name}: leave one of them out")
    return conflicts
