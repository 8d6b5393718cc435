"""Adapters in folders, in PEFT's format, and the fingerprint of their base."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import PREFIX, AdapterPlan, scaling
from vlmrl.models.adapters import HALVES, MAGNITUDE, adapter_tensors, lora_config, low_rank_delta
from vlmrl.plugins import ADAPTER_CONFIG, MODEL_FLAG, ONLY_SAFETENSORS, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONFIG, _WEIGHTS, _BASE = ADAPTER_CONFIG, "adapter_model.safetensors", "base.json"
_PICKLED = "adapter_model.bin"
_SAMPLE_BYTES = 4096
"""Bytes of each tensor in the fingerprint of a base. They suffice: fine-tunes of one model differ in every tensor."""


@dataclass(frozen=True, slots=True)
class Base:
    """The model that an adapter was trained on."""

    path: str
    fingerprint: str | None
    """Its `base_fingerprint`; None for adapters of other programs."""
    is_four_bit: bool
    """It was in 4 bits, so that its weights differed from those of its files."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredAdapter:
    """An adapter read from a folder."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    has_magnitude: bool
    targets: tuple[str, ...]
    """Full names of the layers, as the model has them in memory."""
    tensors: dict[str, Tensor]
    """Under PEFT's names: tensors of the targets, and of modules that were trained in full (`modules_to_save`)."""
    base: Base

    @property
    def param_dtype(self) -> str | None:
        """`ds.param_dtype` of the run that trained it; None for other programs, whose adapters may differ in type from
        the model."""
        if self.base.fingerprint is None:
            return None
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(
            self.tensors[f"{PREFIX}{self.targets[0]}.{HALVES[0]}.weight"].dtype
        )

    @property
    def scaling(self) -> float:
        """Factor of B @ A."""
        return scaling(self.rank, self.alpha, is_rank_stabilized=self.is_rank_stabilized)

    def delta(self, target: str, weight: Tensor) -> Tensor:
        """Compute the adapter's change of the weight [out, in] of a target, in fp32."""
        return low_rank_delta(
            *(self.tensors[f"{PREFIX}{target}.{half}.weight"] for half in HALVES),
            scaling=self.scaling,
            weight=weight,
            magnitude=self.tensors[f"{PREFIX}{target}.{MAGNITUDE}"] if self.has_magnitude else None,
        )


def load_adapter_tensors(net: PreTrainedModel, plan: AdapterPlan, stored: StoredAdapter, *, folder: str) -> None:
    """Copy the tensors of a stored adapter into the model's adapter. Call it before the parameters are sharded.

    Raises ConfigError when their ranks, scaling, kinds, layers or shapes differ.
    """
    for name, was, now in (
        ("rank", stored.rank, plan.rank),
        ("alpha", stored.alpha, plan.alpha),
        ("use_rslora", stored.is_rank_stabilized, plan.is_rank_stabilized),
        ("use_dora", stored.has_magnitude, plan.has_magnitude),
    ):
        if was != now:
            raise ConfigError(
                f"actor.adapter_name_or_path: {folder} has ds.lora.{name} {was}, this run has {now}: set it to {was}"
            )
    parameters = dict(adapter_tensors(net))
    differ = sorted(parameters.keys() ^ stored.tensors.keys())
    if differ:
        raise ConfigError(
            f"actor.adapter_name_or_path: {folder} is for other layers: {len(differ)} tensors differ, such as "
            f"{differ[0]}; set ds.lora.target_modules to those that it was trained on"
        )
    for name, parameter in parameters.items():
        if parameter.shape != stored.tensors[name].shape:
            raise ConfigError(
                f"actor.adapter_name_or_path: {name} of {folder} has shape {list(stored.tensors[name].shape)}, the "
                f"model's has {list(parameter.shape)}: the adapter belongs to another model"
            )
        parameter.data.copy_(stored.tensors[name])


def write_adapter(folder: Path, plan: AdapterPlan, tensors: Iterable[tuple[str, Tensor]], *, base: Base) -> None:
    """Write an adapter in PEFT's format, which vLLM loads too, with the metadata that `read_adapter` checks."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    save_file(on_cpu, folder / _WEIGHTS, metadata={"format": "pt"})
    config = lora_config(plan)
    # Absolute, so that readers with another working directory find the folder; a Hub id stays as it is.
    path = Path(base.path).expanduser()
    config.base_model_name_or_path = str(path.absolute()) if path.is_dir() else base.path
    config.inference_mode = True
    config.save_pretrained(folder)
    facts = {"fingerprint": base.fingerprint, "load_in_4bit": base.is_four_bit, "targets": plan.targets}
    (folder / _BASE).write_text(json.dumps(facts, indent=1))


def read_adapter(folder: str | Path, *, flag: str) -> StoredAdapter:
    """Read an adapter in PEFT's format, of vlmrl or of another program.

    Args:
        flag: the setting that names the folder, for messages.

    Raises ConfigError when there is none, when it lacks a tensor, or when vlmrl does not support its kind.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder).expanduser()
    if not (path / _CONFIG).is_file() and (path / "adapter" / _CONFIG).is_file():
        raise ConfigError(f"{flag}: {folder} is the folder of a run: its adapter is in {path / 'adapter'}")
    if not (path / _CONFIG).is_file():
        raise ConfigError(f"{flag}: there is no adapter in {folder}: it holds no {_CONFIG}")
    if not (path / _WEIGHTS).is_file() and (path / _PICKLED).is_file():
        raise ConfigError(f"{flag}: {folder} holds {_PICKLED} and no {_WEIGHTS}: {ONLY_SAFETENSORS}")
    try:
        config: dict[str, Any] = json.loads((path / _CONFIG).read_text())
        facts: dict[str, Any] = json.loads((path / _BASE).read_text()) if (path / _BASE).exists() else {}
        tensors = load_file(path / _WEIGHTS)
        _refuse_other_kinds(config)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{flag}: the adapter in {folder} cannot be read: {first_line(error)}") from error
    suffixes = [f".{half}.weight" for half in HALVES] + [f".{MAGNITUDE}"] * bool(config.get("use_dora"))
    targets = tuple(facts.get("targets") or _targets_of(tensors))
    missing = [n for t in targets for suffix in suffixes if (n := f"{PREFIX}{t}{suffix}") not in tensors]
    if missing or not targets:
        lacks = f"the tensor {missing[0]}" if missing else "every tensor"
        raise ConfigError(f"{flag}: the adapter in {folder} lacks {lacks}: it is damaged, so save or copy it again")
    return StoredAdapter(
        rank=rank,
        alpha=alpha,
        is_rank_stabilized=bool(config.get("use_rslora")),
        has_magnitude=bool(config.get("use_dora")),
        targets=targets,
        tensors=tensors,
        base=Base(
            path=str(config.get("base_model_name_or_path")),
            fingerprint=facts.get("fingerprint"),
            is_four_bit=bool(facts.get("load_in_4bit")),
        ),
    )


def check_base(
    stored: StoredAdapter, path: str, *, folder: str | Path, flag: str, model_flag: str = MODEL_FLAG
) -> None:
    """Raise ConfigError when the model `path` is not the one that the adapter in `folder` was trained on.

    An adapter without a fingerprint of its base, written by another program, passes.

    Args:
        flag: the setting that names the folder, for messages.
        model_flag: the setting that names the model.
    """
    if stored.base.fingerprint is not None and stored.base.fingerprint != base_fingerprint(path, flag=model_flag):
        raise ConfigError(
            f"{flag}: the adapter in {folder} was trained on other weights than those of {path} "
            f"(its base was {stored.base.path}): use it with that base"
        )


def base_fingerprint(path: str, *, flag: str = MODEL_FLAG) -> str:
    """Hash name, dtype, shape and first bytes of every tensor of a model, however it is split into files.

    Raises ConfigError when the model `path`, a folder or Hub id, has no safetensors.
    """
    state = xxhash.xxh3_128()
    samples: dict[str, bytes] = {}
    for file in _weight_files(path, flag):
        with file.open("rb") as stream:
            start = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(start))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, end = entry["data_offsets"]
                stream.seek(8 + start + first)
                sample = stream.read(min(end - first, _SAMPLE_BYTES))
                samples[name] = f"{name}|{entry['dtype']}|{entry['shape']}|".encode() + sample
    for name in sorted(samples):
        state.update(samples[name])
    return state.hexdigest()


def _targets_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the layers that have an A or a B."""
    suffixes = tuple(f".{half}.weight" for half in HALVES)
    return list(dict.fromkeys(n.removeprefix(PREFIX).rsplit(".", 2)[0] for n in tensors if n.endswith(suffixes)))


def _refuse_other_kinds(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"its peft_type is {config.get('peft_type')}; vlmrl supports LORA only")
    unsupported = [
        name
        for name in ("rank_pattern", "alpha_pattern", "lora_bias", "fan_in_fan_out", "layer_replication", "use_qalora")
        if config.get(name)
    ]
    if unsupported or config.get("bias", "none") != "none":
        raise ValueError(f"it uses PEFT's {unsupported[0] if unsupported else 'bias'}, which vlmrl does not support")


def _weight_files(path: str, flag: str) -> list[Path]:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file

    where = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path

    def file(name: str) -> str | None:
        path_in_cache: str | None = cached_file(
            where,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return path_in_cache

    index = file(SAFE_WEIGHTS_INDEX_NAME)
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values())) if index else [SAFE_WEIGHTS_NAME]
    files = [file(name) for name in names]
    if None in files:
        raise ConfigError(
            f"{flag}: {path} has no {names[files.index(None)]}, which identifies the base of an adapter: "
            "save the model as safetensors first"
        )
    return [Path(location) for location in files if location is not None]
