"""Values that users of DeepSpeed or vLLM may expect of a setting, each with the reason why vlmrl refuses it."""

_NVME = (
    "not built: weights and optimizer state in files. DeepSpeed compiles its reader on each machine (with libaio), "
    "needs a pinned buffer for each of the tensors that are gathered for a weight sync, and loads a checkpoint without "
    "the state of its optimizer; use cpu, and more ranks"
)

REFUSED_VALUES: dict[str, dict[str, str]] = {"ds.offload": {"nvme": _NVME}}
"""Setting -> value -> why it is refused."""
