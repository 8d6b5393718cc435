"""Time of a step of `vlmrl rl` by phase, from the settings, the model's costs and the rates of the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vlmrl.config.actor import Model
from vlmrl.config.critic import Critic
from vlmrl.config.verbs import RlConfig
from vlmrl.plan.costs import Load, ModelCosts, bytes_between, forward_flops, train_flops
from vlmrl.plan.decoding import decoding
from vlmrl.plan.rates import REASONS, Kind, Rates, Unit, Work
from vlmrl.plan.workload import Workload

TAIL = "rollout tail"
"""The reason of time in which the last responses are decoded."""
_ADAM_BYTES = 28
"""Read and written by Adam per parameter: weight and moments in fp32, and the gradient."""
_OFFLOADED_BYTES = 34
"""The same in main memory, with the gradient's way there and the weight's way back."""
_MOST_SEQUENCES = {"cpu": 256, "cuda": 1024}
"""vLLM's default of `max_num_seqs` for offline use."""


@dataclass(frozen=True, slots=True)
class Part:
    """Work of one kind, on each of its GPUs."""

    kind: Kind
    work: Work
    is_tail: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a step, as a run measures it (`time/<name>_s`)."""

    name: str
    parts: tuple[Part, ...]

    def seconds(self, rates: Rates) -> float:
        """Sum the parts: they follow each other."""
        return sum(self.by_reason(rates).values())

    def by_reason(self, rates: Rates) -> dict[str, float]:
        """Return the seconds by what binds."""
        total: dict[str, float] = {}
        for part in self.parts:
            for unit, amount in part.work.items():
                reason = TAIL if part.is_tail else REASONS[unit]
                total[reason] = total.get(reason, 0.0) + amount * rates.get((part.kind, unit), 0.0)
        return total


@dataclass(frozen=True, slots=True)
class Step:
    """A step, phase by phase."""

    phases: tuple[Phase, ...]
    queue: int
    """`train.async_queue_size` of an asynchronous run; 0: the phases follow each other."""

    def seconds(self, rates: Rates) -> float:
        """Return the time of a step.

        With rollouts of L seconds and everything else of U, an asynchronous step that is Q batches ahead takes at least
        max(U, (L + U) / (1 + Q)), and no less than the engines need without waiting for the longest responses.
        """
        total = sum(phase.seconds(rates) for phase in self.phases)
        if not self.queue:
            return total
        rollout = next(phase for phase in self.phases if phase.name == "rollout")
        others = total - rollout.seconds(rates)
        busy = rollout.seconds(rates) - rollout.by_reason(rates).get(TAIL, 0.0)
        return max(others, busy, total / (1 + self.queue))

    def by_phase(self, rates: Rates) -> dict[str, float]:
        """Phase -> seconds."""
        return {phase.name: phase.seconds(rates) for phase in self.phases}

    def binding(self, rates: Rates) -> tuple[str, str, float]:
        """Return the phase and the reason that take the most time together, and their share of the phases that bind.

        In an asynchronous run engines and trainer work at the same time: those of the slower side, or all where each
        waits for the other.
        """
        shares = {
            (phase.name, reason): seconds for phase in self.phases for reason, seconds in phase.by_reason(rates).items()
        }
        rollout = sum(seconds for (name, reason), seconds in shares.items() if name == "rollout" and reason != TAIL)
        others = sum(seconds for (name, _), seconds in shares.items() if name != "rollout")
        if self.queue and max(rollout, others) >= sum(shares.values()) / (1 + self.queue):
            shares = {key: seconds for key, seconds in shares.items() if (key[0] == "rollout") == (rollout > others)}
        (name, reason), seconds = max(shares.items(), key=lambda item: item[1])
        return name, reason, seconds / max(1e-12, sum(shares.values()))


def step_of(
    config: RlConfig,
    costs: ModelCosts,
    workload: Workload,
    *,
    cache_bytes: float,
    device: str = "cuda",
    critic: ModelCosts | None = None,
) -> Step:
    """Count a step.

    Args:
        cache_bytes: KV cache on each GPU of an engine.
        device: cpu or cuda.
        critic: costs of the critic, if there is one.
    """
    phases = [_rollout(config, costs, workload, cache_bytes, device)]
    load = workload.training_load(config.train.layout)
    ranks, size = _ranks(config.actor), config.ds.sequence_parallel_size
    scored = [] if config.needs_one_pass else [_pass("score", config, config.actor, costs, load, ranks, size)]
    if config.reference_is_base:
        scored.append(_pass("score", config, config.actor, costs, _without_images(load), ranks, size))
    if config.has_reference:
        of_reference = config.ref.num_nodes * config.ref.num_gpus_per_node
        scored.append(_pass("score", config, None, costs, load, of_reference, 1))
    if scored:
        phases.append(Phase("logprob", tuple(scored)))
    # The features of a frozen tower are cached.
    again = load if costs.trains_vision or config.needs_one_pass else _without_images(load)
    updates = [*_update(config, config.actor, costs, again)]
    if critic is not None:
        on = config.resolved_critic
        value = _pass("score", config, on, critic, load, _ranks(on), size)
        phases.append(Phase("value", (value,)))
        of_critic = _update(config, on, critic, again)
        # Apart they train at the same time: a second model of the same size adds nothing.
        updates += of_critic if config.critic_is_with_actor else ()
    phases += [
        Phase("update", tuple(updates)),
        Phase("sync", _sync(config, costs)),
        Phase("other", (_rest(config, costs, workload),)),
    ]
    return Step(tuple(phases), config.train.queue_size)


def _rollout(config: RlConfig, costs: ModelCosts, workload: Workload, cache_bytes: float, device: str) -> Phase:
    vllm = config.vllm
    tensor_parallel, engines = vllm.tensor_parallel_size, vllm.num_engines
    load = workload.prefill_load(engines)
    flops = forward_flops(costs, load)
    prefill: dict[Unit, float] = {"flops": (flops.language + flops.vision) / tensor_parallel}
    prefill["calls"] = float(-(-workload.prompts // engines))
    if tensor_parallel > 1:
        reduced = 4.0 * costs.layers * costs.hidden * costs.bytes_per_parameter * load.tokens
        prefill["link" if tensor_parallel <= config.actor.num_gpus_per_node else "network"] = reduced
    # The prompt of a group is in the cache once.
    per_response = costs.kv_bytes * (workload.prompt_tokens / workload.responses + workload.lengths[-1])
    room = math.floor(cache_bytes * tensor_parallel * vllm.pipeline_parallel_size / max(1.0, per_response))
    slots = max(1, min(vllm.max_num_seqs or _MOST_SEQUENCES[device], room))
    decoded = decoding(
        costs,
        workload.engine_lengths(engines),
        prompt_tokens=workload.prompt_tokens,
        slots=slots,
        tensor_parallel=tensor_parallel,
    )
    parts = [Part("prefill", prefill), Part("decode", decoded.bulk), Part("decode", decoded.tail, is_tail=True)]
    moved = 0.0
    if vllm.enable_sleep and device != "cpu":
        moved += 2 * costs.weight_bytes / tensor_parallel
    if config.ds.enable_sleep and device != "cpu":
        moved += 2 * 12 * costs.trained / _ranks(config.actor)
    if moved:
        parts.append(Part("sleep", {"host": moved}))
    return Phase("rollout", tuple(parts))


def _pass(
    kind: Kind, config: RlConfig, on: Model | Critic | None, costs: ModelCosts, load: Load, ranks: int, shared: int
) -> Part:
    """A pass over all samples of the step, on each of these ranks. Without `on` (a reference) no weights are sharded.

    `shared`: ranks that share the tokens of a pack.
    """
    budget = config.train.max_tokens_per_gpu
    if kind == "score":
        budget = config.rollout.max_tokens_per_gpu or budget
    updates = _updates(config) if kind == "train" else 1
    passes = float(updates * max(1, math.ceil(load.tokens / ranks / updates / budget)))
    stage = config.ds.zero_stage
    if isinstance(on, Critic):
        stage = on.zero_stage if on.zero_stage is not None else stage
    checkpoints = on is not None and bool(on.gradient_checkpointing_enable)
    if kind == "train":
        flops = train_flops(costs, load, checkpoints=checkpoints)
    else:
        forward = forward_flops(costs, load)
        flops = forward.language + forward.vision
    times = 2.0 if kind == "train" else 1.0
    moved_between = bytes_between(costs, load) * (1 + (kind == "train") * (2 + checkpoints)) / ranks
    work: dict[Unit, float] = {"flops": flops / ranks, "bytes": moved_between}
    work |= {"layers": passes * costs.layers, "constant": passes}
    per_node = 1 if on is None else on.num_gpus_per_node
    moved = 0.0
    if on is not None and stage == 3:
        moved += times * passes * costs.weight_bytes
    if kind == "train":
        gradients = costs.trained * costs.bytes_per_parameter
        moved += (passes if stage >= 2 else 2 * updates) * gradients
    collective = gathered(moved, ranks=ranks, per_node=per_node)
    if shared > 1:
        # Queries, keys, values and outputs change ranks in each layer.
        channels = 2 * costs.attention + costs.keys_and_values
        exchanged = (times + checkpoints) * load.tokens / ranks * channels * costs.bytes_per_parameter
        path: Unit = "link" if shared <= per_node else "network"
        collective[path] = collective.get(path, 0.0) + exchanged
    return Part(kind, work | collective)


def gathered(num_bytes: float, *, ranks: int, per_node: int) -> dict[Unit, float]:
    """Return the bytes that a GPU receives when the ranks gather, or reduce and scatter, this many in all.

    Between machines each of a machine's GPUs receives a share of what is elsewhere, and passes it on inside.
    """
    if ranks == 1 or not num_bytes:
        return {}
    nodes = -(-ranks // per_node)
    work: dict[Unit, float] = {"link": num_bytes * (1 - 1 / ranks)} if per_node > 1 else {}
    if nodes > 1:
        work["network"] = num_bytes * (1 - 1 / nodes) / per_node
    return work


def _update(config: RlConfig, on: Model | Critic, costs: ModelCosts, load: Load) -> tuple[Part, ...]:
    """Passes and optimizer steps of a trained model."""
    ranks, epochs = _ranks(on), config.train.max_epochs
    part = _pass("train", config, on, costs, load, ranks, config.ds.sequence_parallel_size)
    stage = config.ds.zero_stage
    shard = costs.trained / (ranks if stage else 1) * _updates(config)
    optimizer: dict[Unit, float] = {"bytes": _ADAM_BYTES * shard, "constant": float(_updates(config))}
    if config.ds.adam_offload:
        optimizer = {"host": _OFFLOADED_BYTES * shard}
    if stage in (1, 2):
        weights = costs.trained * costs.bytes_per_parameter * _updates(config)
        optimizer |= gathered(weights, ranks=ranks, per_node=on.num_gpus_per_node)
    return tuple(
        Part(p.kind, {unit: amount * epochs for unit, amount in p.work.items()})
        for p in (part, Part("optimizer", optimizer))
    )


def _updates(config: RlConfig) -> int:
    """Optimizer steps of one pass over the samples."""
    return max(1, config.rollout.batch_size * config.rollout.n_samples_per_prompt // config.train.batch_size)


def _sync(config: RlConfig, costs: ModelCosts) -> tuple[Part, ...]:
    """A weight sync: shards are gathered, then sent to the engines.

    Through shared memory they are written once and read by each engine of a machine; between GPUs they take the
    network, or inside a GPU (`ipc`) its memory.
    """
    sent = costs.published * costs.bytes_per_parameter
    ranks, per_node = _ranks(config.actor), config.actor.num_gpus_per_node
    moved: Mapping[Unit, float] = {}
    if config.ds.zero_stage == 3:
        moved = gathered(sent, ranks=ranks, per_node=per_node)
    work: dict[Unit, float] = {**moved, "constant": 1.0, "layers": float(costs.layers)}
    shard = sent / config.vllm.tensor_parallel_size
    if config.vllm.sync_backend == "ipc":
        work["bytes"] = 2 * shard
    elif config.vllm.sync_backend == "nccl":
        apart: Unit = "network" if config.actor.num_nodes > 1 else "link"
        work[apart] = work.get(apart, 0.0) + sent
    else:
        work |= {"host": sent + shard, "bytes": sent + shard}
    return (Part("sync", work),)


def _rest(config: RlConfig, costs: ModelCosts, workload: Workload) -> Part:
    """Data, rewards, advantages and files; and the verification of a step, which scores one group in several ways."""
    one = replace(workload, prompts=1).training_load(config.train.layout)
    flops = forward_flops(costs, one)
    rows = float(workload.all_responses)
    return Part("step", {"constant": 1.0, "rows": rows, "flops": flops.language + flops.vision})


def _without_images(load: Load) -> Load:
    return Load(load.tokens, load.pairs, load.outputs)


def _ranks(on: Model | Critic) -> int:
    return on.num_nodes * on.num_gpus_per_node
