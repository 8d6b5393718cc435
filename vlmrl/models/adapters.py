"""Adapters: put into a model, switched off, kept in a folder as PEFT keeps them, and what they add to a weight."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from vlmrl.errors import ConfigError
from vlmrl.models.adapter_plan import PREFIX, AdapterPlan, scaling
from vlmrl.models.quantize import dequantized, is_four_bit
from vlmrl.plugins import ADAPTER_CONFIG, MODEL_FLAG, ONLY_SAFETENSORS, first_line

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

_NAME = "default"
"""PEFT's name of the only adapter in a model."""
_HALVES = ("lora_A", "lora_B")
_MAGNITUDE = "lora_magnitude_vector"
_CONFIG, _WEIGHTS, _BASE = ADAPTER_CONFIG, "adapter_model.safetensors", "base.json"
_PICKLED = "adapter_model.bin"
_SAMPLE_BYTES = 4096
"""So much of each tensor goes into the fingerprint of a base: two fine-tunes of one model differ in all of them."""


@dataclass(frozen=True, slots=True)
class Base:
    """The model that an adapter was trained on, and is nothing without."""

    path: str
    fingerprint: str | None
    """`base_fingerprint` of it; None where whoever wrote the adapter left none."""
    is_four_bit: bool
    """It was held in 4 bits, so that its weights were others than those of its files."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredAdapter:
    """An adapter as it lies in a folder."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    has_magnitude: bool
    targets: tuple[str, ...]
    """Full names of the layers, as the model has them in memory."""
    tensors: dict[str, Tensor]
    """Under PEFT's names: of the targets, and of what else was trained whole (`modules_to_save`)."""
    base: Base

    @property
    def param_dtype(self) -> str | None:
        """`ds.param_dtype` of the run that trained it; None where another program did, which may have kept the adapter
        in another type than the model."""
        if self.base.fingerprint is None:
            return None
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(
            self.tensors[f"{PREFIX}{self.targets[0]}.{_HALVES[0]}.weight"].dtype
        )

    @property
    def scaling(self) -> float:
        """What B @ A is multiplied by."""
        return scaling(self.rank, self.alpha, is_rank_stabilized=self.is_rank_stabilized)

    def delta(self, target: str, weight: Tensor) -> Tensor:
        """What the adapter adds to the weight [out, in] of one of its targets, in fp32."""
        return low_rank_delta(
            *(self.tensors[f"{PREFIX}{target}.{half}.weight"] for half in _HALVES),
            scaling=self.scaling,
            weight=weight,
            magnitude=self.tensors[f"{PREFIX}{target}.{_MAGNITUDE}"] if self.has_magnitude else None,
        )


# ---------------------------------------------------------------- in a model


def inject(net: PreTrainedModel, plan: AdapterPlan) -> None:
    """Give the planned layers an adapter that adds nothing yet, and freeze all else. The model keeps its class.

    Its matrices have the dtype that the model computes in. Raises ConfigError when the model lacks one of the layers,
    or has one of them frozen already: somebody wants it to stay as it is.
    """
    from peft import inject_adapter_in_model

    modules = dict(net.named_modules())
    for target in plan.targets:
        if target not in modules:
            raise ConfigError(f"the adapter is for a layer {target}, which {type(net).__name__} has not")
        weight: Any = modules[target].weight
        if not (weight.requires_grad or is_four_bit(weight)):
            raise ConfigError(f"{target} is frozen, and an adapter would change it: leave it out of its targets")
    inject_adapter_in_model(lora_config(plan), net)
    found = _adapted(net)
    assert found.keys() == set(plan.targets), f"PEFT adapted {sorted(found.keys() ^ set(plan.targets))[:3]}"
    net.requires_grad_(False)
    dtype = net.get_input_embeddings().weight.dtype
    for _, parameter in adapter_tensors(net):
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(True)


@contextmanager
def adapters_off(net: nn.Module) -> Iterator[None]:
    """Within the context, the model is its base.

    PEFT's own switch turns the gradients of the adapters off too, which DeepSpeed must not see.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in net.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "a model without an adapter has none to switch off"
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_tensors(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the adapters under their names in PEFT's files, in the order of the model's layers."""
    found: list[tuple[str, nn.Parameter]] = []
    for name, layer in _adapted(net).items():
        found += [(f"{PREFIX}{name}.{half}.weight", getattr(layer, half)[_NAME].weight) for half in _HALVES]
        if _NAME in layer.lora_magnitude_vector:
            found.append((f"{PREFIX}{name}.{_MAGNITUDE}", layer.lora_magnitude_vector[_NAME].weight))
    return found


@torch.no_grad()
def delta(layer: nn.Module) -> Tensor:
    """What the adapter of a layer adds to its weight, [out, in] in fp32. All parameters of the layer must be whole."""
    found: Any = layer
    has_magnitude = _NAME in found.lora_magnitude_vector
    return low_rank_delta(
        found.lora_A[_NAME].weight,
        found.lora_B[_NAME].weight,
        scaling=found.scaling[_NAME],
        weight=dequantized(found.get_base_layer().weight) if has_magnitude else None,
        magnitude=found.lora_magnitude_vector[_NAME].weight if has_magnitude else None,
    )


def low_rank_delta(
    a: Tensor, b: Tensor, *, scaling: float, weight: Tensor | None = None, magnitude: Tensor | None = None
) -> Tensor:
    """scaling * B @ A, or what makes `weight` DoRA's (arXiv:2402.09353, equation 5); [out, in] in fp32.

    Args:
        a: [rank, in]
        b: [out, rank]
        weight: [out, in], of the base; DoRA needs it.
        magnitude: [out]; without it the adapter is plain LoRA.
    """
    added = scaling * (b.float() @ a.float())
    if magnitude is None:
        return added
    assert weight is not None
    moved = weight.float() + added
    scale = magnitude.float() / torch.linalg.vector_norm(moved, dim=1)
    return scale[:, None] * moved - weight.float()


def set_tensors(net: PreTrainedModel, plan: AdapterPlan, stored: StoredAdapter, *, folder: str) -> None:
    """Go on from a stored adapter: put its tensors into the model's own adapter, which must be of the same make.

    Call before the parameters are sharded. Raises ConfigError when it is not.
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
    own = dict(adapter_tensors(net))
    differ = sorted(own.keys() ^ stored.tensors.keys())
    if differ:
        raise ConfigError(
            f"actor.adapter_name_or_path: {folder} is for other layers: {len(differ)} tensors differ, such as "
            f"{differ[0]}; set ds.lora.target_modules to those that it was trained on"
        )
    for name, parameter in own.items():
        if parameter.shape != stored.tensors[name].shape:
            raise ConfigError(
                f"actor.adapter_name_or_path: {name} of {folder} is {list(stored.tensors[name].shape)}, and the "
                f"model's is {list(parameter.shape)}: it belongs to another model"
            )
        parameter.data.copy_(stored.tensors[name])


# ---------------------------------------------------------------- in a folder


def write_adapter(folder: Path, plan: AdapterPlan, tensors: Iterable[tuple[str, Tensor]], *, base: Base) -> None:
    """Write an adapter as PEFT does, so that PEFT and vLLM load it, and beside it what `read_adapter` checks."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    save_file(whole, folder / _WEIGHTS, metadata={"format": "pt"})
    config = lora_config(plan)
    # A folder is found from wherever the adapter is read; a Hub id stays one.
    path = Path(base.path).expanduser()
    config.base_model_name_or_path = str(path.absolute()) if path.is_dir() else base.path
    config.inference_mode = True
    config.save_pretrained(folder)
    told = {"fingerprint": base.fingerprint, "load_in_4bit": base.is_four_bit, "targets": plan.targets}
    (folder / _BASE).write_text(json.dumps(told, indent=1))


def read_adapter(folder: str | Path, *, flag: str) -> StoredAdapter:
    """The adapter in a folder, ours or another's in PEFT's format.

    Args:
        flag: the setting that named the folder, for messages.

    Raises ConfigError when there is none, when it lacks a tensor, or when it is of a kind that vlmrl does not have.
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
        told: dict[str, Any] = json.loads((path / _BASE).read_text()) if (path / _BASE).exists() else {}
        tensors = load_file(path / _WEIGHTS)
        _refuse_other_kinds(config)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{flag}: the adapter in {folder} cannot be read: {first_line(error)}") from error
    endings = [f".{half}.weight" for half in _HALVES] + [f".{_MAGNITUDE}"] * bool(config.get("use_dora"))
    targets = tuple(told.get("targets") or _targets_of(tensors))
    lost = [n for t in targets for end in endings if (n := f"{PREFIX}{t}{end}") not in tensors]
    if lost or not targets:
        what = f"the tensor {lost[0]}" if lost else "every tensor"
        raise ConfigError(f"{flag}: the adapter in {folder} lacks {what}: it is damaged, so save or copy it again")
    return StoredAdapter(
        rank=rank,
        alpha=alpha,
        is_rank_stabilized=bool(config.get("use_rslora")),
        has_magnitude=bool(config.get("use_dora")),
        targets=targets,
        tensors=tensors,
        base=Base(
            path=str(config.get("base_model_name_or_path")),
            fingerprint=told.get("fingerprint"),
            is_four_bit=bool(told.get("load_in_4bit")),
        ),
    )


def check_base(
    stored: StoredAdapter, path: str, *, folder: str | Path, flag: str, model_flag: str = MODEL_FLAG
) -> None:
    """Raises ConfigError when the model in `path` is not the one that the adapter in `folder` was trained on.

    An adapter without a fingerprint of its base, which another program wrote, passes.

    Args:
        flag: the setting that named the folder, for messages.
        model_flag: the setting that named the model.
    """
    if stored.base.fingerprint is not None and stored.base.fingerprint != base_fingerprint(path, flag=model_flag):
        raise ConfigError(
            f"{flag}: the adapter in {folder} was trained on other weights than those of {path} "
            f"(its base was {stored.base.path}): give it that base"
        )


def base_fingerprint(path: str, *, flag: str = MODEL_FLAG) -> str:
    """Digest of a model's files: of every tensor its name, dtype, shape and first bytes, however the files are cut.

    Raises ConfigError when the model in the folder or Hub id `path` has no safetensors.
    """
    state = xxhash.xxh3_128()
    found: dict[str, bytes] = {}
    for file in _weight_files(path, flag):
        with file.open("rb") as stream:
            start = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(start))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, end = entry["data_offsets"]
                stream.seek(8 + start + first)
                sample = stream.read(min(end - first, _SAMPLE_BYTES))
                found[name] = f"{name}|{entry['dtype']}|{entry['shape']}|".encode() + sample
    for name in sorted(found):
        state.update(found[name])
    return state.hexdigest()


def lora_config(plan: AdapterPlan) -> LoraConfig:
    """PEFT's configuration of the adapter."""
    from peft import LoraConfig

    return LoraConfig(
        r=plan.rank,
        lora_alpha=plan.alpha,
        lora_dropout=plan.dropout,
        use_rslora=plan.is_rank_stabilized,
        use_dora=plan.has_magnitude,
        # A list of more than twenty names would be shortened to endings, which tower and language model share.
        target_modules=exactly(plan.targets),
    )


def exactly(names: Iterable[str]) -> str:
    """A regular expression that matches these names and no other, shorter than all of them.

    `a.0.q a.0.k a.1.q a.1.k` becomes `a\\.(?:0|1)(?:\\.q|\\.k)`.
    """
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"(.*?\.)(\d+)(\..*)", name)
        before, number, after = match.groups() if match else (name, "", "")
        numbers.setdefault((before, after), []).append(number)
    endings: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (before, after), found in numbers.items():
        endings.setdefault((before, tuple(found)), []).append(after)
    return "|".join(re.escape(before) + _any(found) + _any(after) for (before, found), after in endings.items())


def _any(parts: Iterable[str]) -> str:
    escaped = [re.escape(part) for part in parts]
    return escaped[0] if len(escaped) == 1 else f"(?:{'|'.join(escaped)})"


def _adapted(net: nn.Module) -> dict[str, LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in net.named_modules() if isinstance(module, LoraLayer)}


def _targets_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """The layers that at least one half names."""
    ends = tuple(f".{half}.weight" for half in _HALVES)
    return list(dict.fromkeys(n.removeprefix(PREFIX).rsplit(".", 2)[0] for n in tensors if n.endswith(ends)))


def _refuse_other_kinds(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"its kind is {config.get('peft_type')}, and vlmrl knows LORA alone")
    odd = [
        name
        for name in ("rank_pattern", "alpha_pattern", "lora_bias", "fan_in_fan_out", "layer_replication", "use_qalora")
        if config.get(name)
    ]
    if odd or config.get("bias", "none") != "none":
        raise ValueError(f"it was made with PEFT's {odd[0] if odd else 'bias'}, which vlmrl does not have")


def _weight_files(path: str, flag: str) -> list[Path]:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file

    where = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path

    def file(name: str) -> str | None:
        found: str | None = cached_file(
            where,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return found

    index = file(SAFE_WEIGHTS_INDEX_NAME)
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values())) if index else [SAFE_WEIGHTS_NAME]
    files = [file(name) for name in names]
    if None in files:
        raise ConfigError(
            f"{flag}: {path} has no {names[files.index(None)]}, which tells an adapter's base from "
            "others: save the model as safetensors first"
        )
    return [Path(found) for found in files if found is not None]
