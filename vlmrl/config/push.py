"""The settings of `vlmrl push`."""

from collections.abc import Sequence
from typing import ClassVar

from vlmrl.config.base import Section, Text
from vlmrl.config.verb_base import VerbConfig


class Push(Section):
    """The model, and its repository on the Hub."""

    run: Text
    """Output folder of a run, or the folder of one model."""
    repo: Text
    """Repository: `owner/name`, or a name alone for one of your own. It is made if it does not exist."""
    model: Text | None = None
    """Which model of the run: `model`, `adapter`, `best`, `critic`, `model_ema` or `adapter_ema`; by default the final
    model or adapter."""
    base: Text | None = None
    """Hub id of the base model, where the run began with a local folder: it is named in the card and in an adapter's
    configuration, and its licence is read from the Hub."""
    private: bool = False
    """Only you, and members of the organization, see the repository. An existing one must be private already."""


class PushConfig(VerbConfig):
    """Upload a model of a run to the Hugging Face Hub, with its model card.

    `vlmrl push RUN --repo NAME` is `vlmrl push --push.run RUN --push.repo NAME`. The token comes from the environment
    variable HF_TOKEN, or from `hf auth login`.
    """

    verb: ClassVar[str] = "push"

    push: Push


def full_names(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the full names of the settings: `RUN --repo NAME` is `--push.run RUN
    --push.repo NAME`."""
    named = [f"--push.{word[2:]}" if word[2:].partition("=")[0] in Push.model_fields else word for word in words]
    return ["--push.run", *named] if named and not named[0].startswith("-") else named
