"""Estimates of placements of one run, and the checks that each must pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vlmrl.cluster.placement import plan as place
from vlmrl.cluster.roles import plan_arguments
from vlmrl.cluster.session import Session
from vlmrl.cluster.sync_plan import check_devices
from vlmrl.commands.memory import Machine, MemoryPlan, memory_plan
from vlmrl.config.names import is_given, setting_value
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models.configured import ConfiguredModels
from vlmrl.plan.costs import ModelCosts
from vlmrl.plan.placements import Cluster, Found, Settings, search
from vlmrl.plan.planner import heads_of, is_apart, nested, sequence_sizes, with_settings
from vlmrl.plan.rates import Rates
from vlmrl.plan.step import Step, step_of
from vlmrl.plan.workload import Workload

_ONLY_GPUS = (
    *("vllm.enable_sleep", "vllm.sync_backend", "vllm.gpu_memory_utilization"),
    *("ds.enable_sleep", "ds.adam_offload"),
)
"""Settings that a plan for a CPU leaves out."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Estimates of placements of one run."""

    config: RlConfig
    """The given settings; the model is a folder that can be read."""
    machine: Machine
    session: Session
    """The GPUs, for the placement of roles."""
    models: ConfiguredModels
    costs: ModelCosts
    critic: ModelCosts | None
    workload: Workload
    rates: Rates

    def configured(self, settings: Settings) -> RlConfig:
        """Return the run in this placement, without checks."""
        chosen = dict(settings)
        if self.machine.device == "cpu":
            chosen = {name: value for name, value in chosen.items() if name not in _ONLY_GPUS}
        others: dict[str, Any] = {}
        if self.config.has_critic and chosen.get("train.colocate_all") is not True:
            others |= {"train.colocate_actor_critic": True}
        if self.config.has_reference and "ref" not in self.apart:
            others |= {f"ref.{name}": chosen[f"actor.{name}"] for name in ("num_nodes", "num_gpus_per_node")}
        chosen |= {name: value for name, value in others.items() if not is_given(self.config, name)}
        return with_settings(self.config, chosen)

    @property
    def apart(self) -> dict[str, int]:
        """Roles that are given GPUs of their own, with their number of GPUs."""
        config = self.config
        roles = {}
        if config.has_reference and is_apart(config, "train.colocate_actor_ref"):
            roles["ref"] = config.ref.num_nodes * config.ref.num_gpus_per_node
        if config.has_critic and is_apart(config, "train.colocate_actor_critic"):
            roles["critic"] = config.critic.num_nodes * config.critic.num_gpus_per_node
        return roles

    def memory(self, settings: Settings) -> MemoryPlan:
        """Estimate the memory of a placement."""
        return memory_plan(self.configured(settings), self.machine, self.models)

    def step(self, settings: Settings) -> Step:
        """Count the step of a placement."""
        config = self.configured(settings)
        return step_of(
            config,
            self.costs,
            self.workload,
            cache_bytes=cache_bytes(self.memory(settings)),
            device=self.machine.device,
            critic=self.critic,
        )

    def seconds(self, settings: Settings) -> float:
        """Estimate the time of a step."""
        return self.step(settings).seconds(self.rates)

    def fits(self, settings: Settings) -> bool:
        """Whether a placement fits into memory."""
        try:
            self.memory(settings).check()
        except ClusterError:
            return False
        return True

    def agrees(self, settings: Settings) -> bool:
        """Whether `vlmrl rl` accepts the settings of a placement, and all its roles find GPUs and main memory."""
        try:
            config = RlConfig.model_validate(nested(self.yaml_settings(settings)))
            places = place(**plan_arguments(config, self.session))
            check_devices(config.vllm, self.session, places)
        except (ClusterError, ConfigError, ValidationError):
            return False
        nodes = len(self.session.nodes)
        needed = [0.0] * nodes
        for role, _ in self.memory(settings).roles:
            for where in places.get(role.name, places["actor"]):
                processes = len(where.slots) if role.name == "vllm" else 1
                needed[where.node] += processes * role.num_bytes(on_device=False)
        return max(needed) <= self.machine.host_bytes / nodes

    def yaml_settings(self, settings: Settings) -> dict[str, Any]:
        """Return the given and the chosen settings, by full names; those that the run does not read are left out."""
        config = self.configured(settings)
        names = [name for name in RlConfig.settings() if is_given(config, name)]
        unread = config.unread()
        return {name: setting_value(config, name) for name in names if name not in unread}

    def search(self, cluster: Cluster, fixed: Settings) -> list[Found]:
        """Return the placements that fit, the fastest first."""
        return search(
            cluster,
            heads=heads_of(self.config),
            reference=self.config.has_reference,
            fixed=fixed,
            seconds=self.seconds,
            fits=self.fits,
            agrees=self.agrees,
            stages=self.config.vllm.pipeline_parallel_size,
            sequence_sizes=sequence_sizes(self.config),
            apart=sum(self.apart.values()),
        )


def cache_bytes(plan: MemoryPlan) -> float:
    """Return the KV cache on each GPU of an engine."""
    engine = next(role for role, _ in plan.roles if role.name == "vllm")
    return sum(part.num_bytes for part in engine.parts if part.name == "KV cache")
