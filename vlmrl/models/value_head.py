"""Models with a value head: one number per state, the value of a critic or the score of a reward model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from vlmrl.errors import ConfigError
from vlmrl.models.kind import CLASSIFIER, has_score_layer
from vlmrl.models.load import read_weights, refuse_missing_weights, skeleton, without_weights
from vlmrl.models.quantize import FourBit, quantization
from vlmrl.models.scorer import Backbone, ImageFeatures
from vlmrl.models.sequence import SequenceGroup
from vlmrl.plugins import MODEL_FLAG

if TYPE_CHECKING:
    from vlmrl.plugins import Processor

HEAD = "score.weight"
"""Name of the head's weight [labels, D], in memory and in files, as in Transformers."""


class ValueOutput(NamedTuple):
    """Values in the layout of the inputs."""

    values: Tensor
    """[B, T] fp32 (fp64 for fp64 models); 0 on tokens that are not scored."""


class ValueModel(Backbone):
    """Wrapper of a `value_net` model that returns values per token."""

    def __init__(self, net: PreTrainedModel, sequence: SequenceGroup | None = None) -> None:
        super().__init__(net, sequence)
        ScoreHead.adopt(net.score)

    def forward(
        self,
        inputs: dict[str, Any],
        *,
        features: dict[str, ImageFeatures] | None = None,
        positions: dict[str, Tensor] | None = None,
    ) -> ValueOutput:
        """Compute the values of the tokens that `inputs["scored"]` marks: V_t from the state before token t, which is
        the context that it was sampled from.

        Args:
            inputs: result of `models.inputs.model_inputs`, on the model's device.
            features: see `Scorer.forward`.
            positions: result of `models.inputs.states_at`, on the model's device: values of these tokens instead, from
                the states at them.
        """
        inputs = inputs | (positions or {})
        states, _ = self.states(inputs, features=features)
        return ValueOutput(self.scatter(self.net.score(states), inputs))


class ScoreHead(nn.Linear):
    """The value head: one number per state, in fp32 even in models that compute in bf16, which has two digits.

    A head of two labels returns the log-odds of the second, the positive one.
    """

    @classmethod
    def adopt(cls, linear: nn.Linear) -> ScoreHead:
        """Change the class of `linear` in place; its parameter and its name stay the same."""
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
    """Load a text or vision-language model with a score layer, `net.score`, in place of its output layer.

    The score layer is read from the files if they have one. Otherwise it is initialized from `head_seed`, normally with
    a deviation of 1 / (D + 1), so that the first values are small. `save_pretrained` writes the model as one for
    sequence classification, which `AutoModelForSequenceClassification` reads if it knows the family, and `value_net`
    always. The device is that of `load_model`.

    Args:
        path: folder or Hub id.
        head_seed: None if the files must have a score layer: a reward model with a new one would score at random.
        labels: 1 or 2, for a new layer.
        flag: the setting that `path` came from, for messages.

    Raises ConfigError when there is no such model, when it cannot be read, or when its files lack a weight.
    """
    bare = skeleton(path, trust_remote_code=trust_remote_code, flag=flag)
    config = bare.config
    if type(bare).is_remote_code():
        raise ConfigError(f"{flag}: {path} comes with its own code, to which no value head can be added")
    has_head = has_score_layer(config)
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
        raise ConfigError(f"{flag}: {path} has no score layer, so it is not a reward model: name a model that has one")
    refuse_missing_weights(lacking, path, flag=flag)
    return net


class Scale(NamedTuple):
    """Mean and standard deviation of a reward model's scores on its training data."""

    mean: float
    std: float


def save_value_model(net: PreTrainedModel, processor: Processor, folder: Path, *, scale: Scale | None = None) -> None:
    """Write an unsharded `value_net` model and its processor to `folder`.

    A `scale` is stored in config.json under OpenRLHF's names, `mean` and `std`.
    """
    if scale is not None:
        net.config.mean, net.config.std = scale
    net.save_pretrained(folder)
    processor.save(folder)


def _classifier(bare: PreTrainedModel, *, head_seed: int | None) -> type[PreTrainedModel]:
    """Make the class for sequence classification of `bare`'s family, in the way of Transformers, which has none for
    most vision-language families. With a seed, files may lack the score layer.
    """
    family = re.sub("(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", type(bare).__name__)
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(bare.config.model_type, f"{family}{CLASSIFIER}")
    names_in_files = get_checkpoint_conversion_mapping(type(bare).__name__)
    if names_in_files is not None:
        # Some families have other weight names in files, which Transformers looks up by the name of the class.
        register_checkpoint_conversion_mapping(name, names_in_files, overwrite=True)
    logits = [n for n, module in bare.named_modules() if module is bare.get_output_embeddings()]

    def init_weights(self: Any, module: Any) -> None:
        if module is not self.score or head_seed is None:
            super(classifier, self)._init_weights(module)
            return
        labels, width = self.score.weight.shape
        noise = torch.randn(labels, width, generator=torch.Generator().manual_seed(head_seed), device="cpu")
        initialization.copy_(module.weight, noise / (width + 1))

    classifier: Any = type(
        name,
        (GenericForSequenceClassification, type(bare.base_model).__bases__[0]),
        {
            "base_model_prefix": bare.base_model_prefix,
            "_init_weights": init_weights,
            "_keys_to_ignore_on_load_unexpected": [re.escape(f"{n}.") for n in logits],
            "_keys_to_ignore_on_load_missing": [] if head_seed is None else [re.escape(HEAD)],
            # Transformers loads classes of modules outside Transformers differently.
            "__module__": type(bare).__module__,
        },
    )
    result: type[PreTrainedModel] = classifier
    return result
