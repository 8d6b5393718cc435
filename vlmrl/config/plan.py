"""The settings of `vlmrl plan`: those of `vlmrl rl`, the machines, and the lengths."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from vlmrl.config.base import PositiveFloat, PositiveInt, Section, Text, Unread
from vlmrl.config.data import Data
from vlmrl.config.names import is_given, setting_value
from vlmrl.config.verbs import RlConfig

SHORT = {
    "--model": "--actor.model_name_or_path",
    **{f"--{name}": f"--plan.{name}" for name in ("gpus", "gpu", "gpus_per_node", "output", "picture")},
    **{f"--{name}": f"--plan.{name}" for name in ("prompt_tokens", "response_tokens", "image_pixels", "runs")},
}
"""Short flag -> its full name."""


def full_names(words: Sequence[str]) -> list[str]:
    """Replace the short flags: `--gpus 64` is `--plan.gpus 64`, and `--model` is `--actor.model_name_or_path`."""
    names = [word.partition("=") for word in words]
    return [f"{SHORT.get(name, name)}{equals}{value}" for name, equals, value in names]


class Plan(Section):
    """The machines, the lengths of prompts and responses, and the output."""

    gpus: PositiveInt = 8
    """GPUs in all."""
    gpus_per_node: PositiveInt = 8
    """GPUs of a machine; `plan.gpus` is a multiple of it, or less than it."""
    gpu: Text = "H100"
    """GPU: A100-40, A100-80, H100, H200, B200, L40S, RTX4090; `cpu` is this machine, as one device (`--gpus 1`)."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of a GPU; by default that of `plan.gpu`."""
    host_memory_gib: PositiveFloat = 1024.0
    """Main memory of a machine."""
    prompt_tokens: PositiveInt | None = None
    """Mean length of a prompt, image tokens included; by default half of `data.max_len`."""
    response_tokens: PositiveInt | None = None
    """Mean length of a response; by default half of `rollout.max_new_tokens`. Lengths are log-normal, cut at
    `rollout.max_new_tokens`."""
    length_sigma: PositiveFloat = 0.8
    """Standard deviation of the logarithm of a response's length, before the cut."""
    image_pixels: int = Field(default=307_200, ge=0)
    """Pixels of a prompt's images together, of models with images; 0: prompts without images."""
    alternatives: PositiveInt = 5
    """Placements to show."""
    runs: tuple[Text, ...] = ()
    """Output folders of runs on the same kind of machine, to whose times the rates are fitted. Without them the rates
    are those of the GPU's data sheet, times an assumed efficiency."""
    output: Text | None = None
    """YAML file for the settings of the best placement, for `vlmrl rl --config`."""
    picture: Text | None = None
    """PNG file for a picture of the step times."""


class PlannedData(Data):
    """The training data."""

    prompt_dataset: Text = "gsm8k"
    """Dataset of the planned run. The plan does not read it."""


class PlanConfig(RlConfig):
    """A placement of a run of `vlmrl rl` on GPUs, with estimates of memory and step time. Nothing is started.

    `vlmrl plan --model Qwen2.5-VL-72B --gpus 64` is short for --actor.model_name_or_path and --plan.gpus. The model is
    a known name, a local folder, a config.json or a Hub id. All settings of `vlmrl rl` may be given, also by --config;
    the plan chooses the others: ZeRO stage, offload, sequence and tensor parallelism, engines, placement.
    """

    verb: ClassVar[str] = "plan"

    data: PlannedData = PlannedData()
    plan: Plan = Plan()

    def conflicts(self) -> list[str]:
        plan, conflicts = self.plan, []
        if plan.gpus > plan.gpus_per_node and plan.gpus % plan.gpus_per_node:
            conflicts.append(
                f"plan.gpus {plan.gpus} is no multiple of plan.gpus_per_node {plan.gpus_per_node}: placements are of "
                "whole machines"
            )
        if plan.gpu == "cpu" and plan.gpus > 1:
            conflicts.append(
                "plan.gpu cpu is this machine as a whole, whose cores the roles use in turn: set plan.gpus 1"
            )
        for mean, longest, flag in (
            (plan.prompt_tokens, self.data.max_len, "data.max_len"),
            (plan.response_tokens, self.rollout.max_new_tokens, "rollout.max_new_tokens"),
        ):
            if mean is not None and mean > longest:
                name = "prompt_tokens" if flag == "data.max_len" else "response_tokens"
                conflicts.append(f"plan.{name} {mean} is above {flag} {longest}, the longest: raise that")
        return [*conflicts, *super().conflicts()]

    def unread(self) -> Unread:
        unread = super().unread()
        if self.plan.response_tokens == self.rollout.max_new_tokens:
            unread["plan.length_sigma"] = "plan.response_tokens is rollout.max_new_tokens: all responses are as long"
        return unread

    def given(self) -> dict[str, Any]:
        """Full name -> value of the settings of `vlmrl rl` that were given."""
        return {name: setting_value(self, name) for name in RlConfig.settings() if is_given(self, name)}
