"""A model that gives each state a number: the value that a critic expects from there, or what a reward model thinks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from vlmrl.errors import ConfigError
from vlmrl.models.load import read_weights, refuse_lacking, skeleton, without_weights
from vlmrl.models.quantize import FourBit, quantization
from vlmrl.models.scorer import Backbone, ImageFeatures, scattered
from vlmrl.plugins import MODEL_FLAG, located

if TYPE_CHECKING:
    from vlmrl.plugins import Processor

HEAD = "score.weight"
"""The name of the head's weight [labels, D], in memory and in files: Transformers' own."""

_SCORES = "ForSequenceClassification"


class ValuerOutput(NamedTuple):
    """Of each token, laid out like the inputs."""

    values: Tensor
    """[B, T] fp32 (fp64 for fp64 models); 0 on tokens that were not asked about."""


class Valuer(Backbone):
    """Wraps a model that `value_net` made."""

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__(net)
        ScoreHead.adopt(net.score)

    def forward(
        self,
        inputs: dict[str, Any],
        *,
        features: dict[str, ImageFeatures] | None = None,
        asked: dict[str, Tensor] | None = None,
    ) -> ValuerOutput:
        """The values of the tokens that `inputs["scored"]` marks: V_t from the state before token t, which holds all
        that was known when it was sampled.

        Args:
            inputs: what `models.inputs.model_inputs` made, on the model's device.
            features: as `Scorer.forward` has them.
            asked: what `models.inputs.states_at` made, on the model's device, for the values of those tokens instead,
                from the states at them.
        """
        inputs = inputs | (asked or {})
        states, _ = self.states(inputs, features=features)
        return ValuerOutput(scattered(self.net.score(states), inputs["scored"]))


class ScoreHead(nn.Linear):
    """The head: one number per state, in fp32 whatever the model computes in, for bf16 has no third digit.

    A head of two labels gives the log-odds of the second, the one that says yes.
    """

    @classmethod
    def adopt(cls, linear: nn.Linear) -> ScoreHead:
        """Turn `linear` itself into such a head: its parameter and its name stay what they are."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        return linear

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, D] -> [n]"""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        scores = nn.functional.linear(hidden.to(dtype), self.weight.to(dtype))
        return scores[:, -1] - scores[:, 0] if self.out_features == 2 else scores[:, 0]


def value_net(
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str | dict[str, str] | None,
    trust_remote_code: bool = False,
    four_bit: FourBit | None = None,
    head_seed: int | None,
    labels: int = 1,
    flag: str = MODEL_FLAG,
) -> PreTrainedModel:
    """The model in the folder or Hub id `path` with a score layer, `net.score`, in the place of its output layer.

    Text and vision-language models alike. The layer is read from the files where they have one. Else it is new: normal
    with a deviation of 1 / (D + 1), so that the first values are small, drawn from `head_seed`. The model is where
    `load_model` would put it. Written by `save_pretrained`, it is a model for sequence classification: Transformers'
    `AutoModelForSequenceClassification` reads it where it knows the family, `value_net` always.

    Args:
        head_seed: None when the files must have a score layer: a reward model with a new one would score at random.
        labels: 1 or 2, of a new layer.
        flag: the setting that `path` came from, for messages.

    Raises ConfigError when there is no such model, when it cannot be read, or when its files lack a weight.
    """
    bare = skeleton(path, trust_remote_code=trust_remote_code, flag=flag)
    config = bare.config
    if type(bare).is_remote_code():
        raise ConfigError(f"{flag}: {path} comes with code of its own, to which no value head can be added")
    has_head = _says_classifier(config)
    if not has_head:
        config.num_labels = labels
    elif config.num_labels > 2:
        raise ConfigError(f"{flag}: {path} has a score layer of {config.num_labels} labels: use one of 1 or 2")
    kind = _classifier(bare, head_seed=None if has_head else head_seed)
    net, lacking = read_weights(
        kind,
        path,
        config=config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=False,
        bits=None if four_bit is None else quantization(four_bit, without_weights(kind, config), dtype=dtype),
        flag=flag,
    )
    if lacking == [HEAD] and not has_head:
        raise ConfigError(f"{flag}: {path} has no score layer, so it is no reward model: name one that has")
    refuse_lacking(lacking, path, flag=flag)
    return net


class Scale(NamedTuple):
    """Where a reward model's scores lie on its own data."""

    mean: float
    std: float


def is_classifier(path: str, *, trust_remote_code: bool = False) -> bool:
    """Whether the model in the folder or Hub id `path` says that it has a score layer."""
    return _says_classifier(AutoConfig.from_pretrained(located(path), trust_remote_code=trust_remote_code))


def save_value_model(net: PreTrainedModel, processor: Processor, folder: Path, *, scale: Scale | None = None) -> None:
    """Write a model of `value_net`, all of it in memory, and its processor, so that `folder` loads by itself.

    With a `scale` config.json holds it, under OpenRLHF's names `mean` and `std`.
    """
    if scale is not None:
        net.config.mean, net.config.std = scale
    net.save_pretrained(folder)
    processor.save(folder)


def _says_classifier(config: PreTrainedConfig) -> bool:
    return any(name.endswith(_SCORES) for name in config.architectures or ())


def _classifier(bare: PreTrainedModel, *, head_seed: int | None) -> type[PreTrainedModel]:
    """The class of `bare`'s family for sequence classification, made as Transformers makes its own: it has none of
    most vision-language families. With a seed, its files need not have a score layer.
    """
    family = re.sub("(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", type(bare).__name__)
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(bare.config.model_type, f"{family}{_SCORES}")
    names_in_files = get_checkpoint_conversion_mapping(type(bare).__name__)
    if names_in_files is not None:
        # Some families call their weights otherwise in files, and Transformers looks that up by the name of the class.
        register_checkpoint_conversion_mapping(name, names_in_files, overwrite=True)
    logits = [n for n, module in bare.named_modules() if module is bare.get_output_embeddings()]

    def init_weights(self: Any, module: Any) -> None:
        if module is not self.score or head_seed is None:
            super(made, self)._init_weights(module)
            return
        labels, width = self.score.weight.shape
        drawn = torch.randn(labels, width, generator=torch.Generator().manual_seed(head_seed), device="cpu")
        initialization.copy_(module.weight, drawn / (width + 1))

    made: Any = type(
        name,
        (GenericForSequenceClassification, type(bare.base_model).__bases__[0]),
        {
            "base_model_prefix": bare.base_model_prefix,
            "_init_weights": init_weights,
            "_keys_to_ignore_on_load_unexpected": [re.escape(f"{n}.") for n in logits],
            "_keys_to_ignore_on_load_missing": [] if head_seed is None else [re.escape(HEAD)],
            # Transformers takes a class of another module for one that is not its own, and loads it differently.
            "__module__": type(bare).__module__,
        },
    )
    found: type[PreTrainedModel] = made
    return found
