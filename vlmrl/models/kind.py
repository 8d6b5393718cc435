"""Whether a model can generate text, or scores it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmrl.errors import ConfigError
from vlmrl.plugins import MODEL_FLAG, first_line, located

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CLASSIFIER = "ForSequenceClassification"
"""End of the names of architectures with a score layer in place of the output layer."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts of a layer in Transformers' configurations of language models."""


def has_score_layer(config: PretrainedConfig) -> bool:
    """Whether a configuration is of a model with a score layer."""
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def read_config(path: str, *, trust_remote_code: bool = False, flag: str = MODEL_FLAG) -> PretrainedConfig:
    """Read the configuration of the model `path`, a folder or Hub id.

    `flag` is the setting that names the model. Raises ConfigError when there is no such model.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(located(path, flag=flag), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{flag}: {path} is not a model that can be read: {first_line(error)}") from error


def is_classifier(path: str, *, trust_remote_code: bool = False, flag: str = MODEL_FLAG) -> bool:
    """Whether the model `path` has a score layer. Raises ConfigError as `read_config`."""
    return has_score_layer(read_config(path, trust_remote_code=trust_remote_code, flag=flag))


def check_generates(path: str, *, trust_remote_code: bool = False, flag: str = MODEL_FLAG) -> None:
    """Raise ConfigError when the model `path` is a reward model or another classifier, which generates no text."""
    if is_classifier(path, trust_remote_code=trust_remote_code, flag=flag):
        raise ConfigError(
            f"{flag}: {path} has a score layer in place of the output layer, as a reward model has, and generates no "
            "text: give the language model that it was made of, or another"
        )
