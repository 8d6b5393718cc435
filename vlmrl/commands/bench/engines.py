"""`vlmrl bench sync`, `rollout` and `agents`: throughput of weight sync, of sampling and of conversations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrl.agents.settings import AgentEngineSettings, EnvironmentSettings
from vlmrl.cluster.build import RoleBuilder
from vlmrl.cluster.data import created_bytes, put
from vlmrl.cluster.engines import RemoteEngines
from vlmrl.cluster.placement import Role, plan
from vlmrl.cluster.role_settings import demand
from vlmrl.cluster.session import Session, session
from vlmrl.cluster.sync_plan import check_devices, plan_sync
from vlmrl.cluster.weight_sync import WeightSync
from vlmrl.cluster.worker_group import WorkerGroup
from vlmrl.commands.bench.output import print_json
from vlmrl.config.bench import Conversations
from vlmrl.config.bench_verbs import AgentsBench, RolloutBench, SyncBench
from vlmrl.config.data import Columns
from vlmrl.config.train import Loop
from vlmrl.config.vision import Vision
from vlmrl.learning.settings import PolicySettings
from vlmrl.models.adapter_plan import AdapterPlan, plan_adapter
from vlmrl.plugins import processor_of
from vlmrl.rollout.capacity import Demand
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Metrics, Part, Prompt, Sampling

if TYPE_CHECKING:
    from vlmrl.commands.bench.conversations import BenchEngine, Timed

_ENVIRONMENT = f"{Path(__file__).with_name('waiting_environment.py')}:make"
_MESSAGE_TOKENS = 128
"""More than any message of this environment has, even with one token per character."""
_NUM_WARM_UP = 64


def sync(config: SyncBench) -> None:
    """Measure seconds and bytes of syncing weights to all engines; the first repeat is a warm-up.

    With `ds.lora.rank`, base and adapters are synced in turn.
    """
    roles = [
        Role("actor", config.actor.num_nodes * config.actor.num_gpus_per_node, 1, flag="--actor.num_gpus_per_node"),
        Role("vllm", config.vllm.num_engines, config.vllm.gpus_per_engine, flag="--vllm.num_engines"),
    ]
    with _session(roles, shares=config.vllm.sync_backend != "nccl") as (builder, machines):
        check_devices(config.vllm, machines, builder.places)
        columns = Columns()
        actor = config.actor
        processor = processor_of(actor.model_name_or_path, columns, trust_remote_code=actor.trust_remote_code)
        adapter = plan_adapter(config.actor, config.ds.lora, processor)
        is_separate = adapter is not None and adapter.fits_engine
        engines = _engines(builder, config, Columns(), max_model_len=256, adapter=adapter if is_separate else None)
        learner = builder.group(
            "actor",
            PolicySettings(
                actor=config.actor,
                ds=config.ds,
                loop=Loop(),
                columns=Columns(),
                vision=Vision(),
                total_steps=1,
                loss=None,
                temperature=1.0,
                bans=True,
                adapter=adapter,
            ).build,
            timeout_s=3600,
            distributed=True,
        )
        sync_plan = plan_sync(adapter, ds=config.ds, vllm=config.vllm, vision_trains=True)
        weight_sync = WeightSync(learner, engines, sync_plan)
        parts: tuple[Part, ...] = ("base", "adapter") if is_separate else ("whole",)
        for number in range(config.bench.repeats + 1):
            for part in parts:
                started = time.perf_counter()
                readback = sync_plan.readback(number, is_first=False)
                num_bytes = weight_sync.send(part, version=number, readback=readback)
                seconds = time.perf_counter() - started
                _print(
                    machines,
                    bench="sync",
                    model=config.actor.model_name_or_path,
                    part=part,
                    repeat=number,
                    warm_up=number == 0,
                    ranks=len(learner),
                    engines=config.vllm.num_engines,
                    zero_stage=config.ds.zero_stage,
                    seconds=round(seconds, 4),
                    bytes=num_bytes,
                    gib_per_s=round(num_bytes / 2**30 / seconds, 4),
                    **({} if part == "adapter" else _rounded(weight_sync.readback())),
                )


def rollout(config: RolloutBench) -> None:
    """Measure tokens per second, and bytes put into the object store, for several numbers of responses per prompt."""
    roles = [Role("vllm", config.vllm.num_engines, config.vllm.gpus_per_engine, flag="--vllm.num_engines")]
    with _session(roles) as (builder, machines):
        prompts = builder.prompts(config)
        max_model_len = config.data.max_len + config.rollout.max_new_tokens
        engines = _engines(builder, config, config.data, max_model_len=max_model_len)
        for width in config.bench.n_samples_per_prompt:
            for number in range(config.bench.repeats + 1):
                sampling = Sampling(
                    n=width,
                    temperature=config.rollout.temperature,
                    top_p=config.rollout.top_p,
                    max_new_tokens=config.rollout.max_new_tokens,
                    seed=config.train.seed,
                )
                before = created_bytes()
                drawn, draw_metrics = prompts.draw(config.rollout.batch_size)
                started = time.perf_counter()
                groups = engines.generate(drawn, sampling)
                seconds = time.perf_counter() - started
                tokens = sum(rollout.num_sampled for group in groups for rollout in group.rollouts)
                _print(
                    machines,
                    bench="rollout",
                    model=config.actor.model_name_or_path,
                    repeat=number,
                    warm_up=number == 0,
                    engines=config.vllm.num_engines,
                    prompts=len(drawn),
                    n_samples_per_prompt=width,
                    seconds=round(seconds, 4),
                    sampled_tokens=tokens,
                    prompt_tokens=sum(len(prompt.tokens) for prompt in drawn),
                    sampled_tokens_per_s=round(tokens / seconds, 1),
                    media_bytes=int(draw_metrics["media/bytes_moved"]),
                    object_store_bytes=created_bytes() - before,
                )


def agents(config: AgentsBench) -> None:
    """Measure tokens per second of conversations with environments, and of the same requests without environments."""
    bench = config.bench
    roles = [Role("vllm", 1, config.vllm.gpus_per_engine, flag="--vllm.tensor_parallel_size")]
    with _session(roles) as (builder, machines):
        build = partial(_build_engine, _agent_settings(config))
        timeout_s = max(config.vllm.start_timeout_s, config.vllm.generate_timeout_s)
        group = builder.group("vllm", build, timeout_s=timeout_s, concurrent=True)
        builder.stack.callback(RemoteEngines(group, timeout_s=timeout_s, sleeps=False).shutdown)
        sampling = Sampling(
            n=1, temperature=1.0, top_p=1.0, max_new_tokens=bench.response_tokens, seed=config.train.seed
        )
        for number in range(bench.repeats + 1):
            prompts = _episodes(bench)[: _NUM_WARM_UP if number == 0 else None]
            played, replayed = _play_and_replay(group, prompts, sampling)
            for timed, more in ((played, _costs(played, replayed, bench)), (replayed, {})):
                _print(
                    machines,
                    bench="agents",
                    model=config.actor.model_name_or_path,
                    repeat=number,
                    warm_up=number == 0,
                    environments=timed is played,
                    episodes=len(prompts),
                    turns=bench.turns,
                    step_s=bench.step_s,
                    seconds=round(timed.seconds, 4),
                    sampled_tokens=timed.sampled_tokens,
                    sampled_tokens_per_s=round(timed.sampled_tokens / timed.seconds, 1),
                    front_end_cpu_s=round(timed.cpu_s, 4),
                    **more,
                )


def _play_and_replay(
    group: WorkerGroup[BenchEngine], prompts: Sequence[Prompt], sampling: Sampling
) -> tuple[Timed, Timed]:
    played = group.call(lambda engine: engine.play(prompts, sampling))[0]
    return played, group.call(lambda engine: engine.replay(played.groups, sampling))[0]


def _costs(played: Timed, replayed: Timed, bench: Conversations) -> dict[str, float]:
    episodes = [rollout.episode for group in played.groups for rollout in group.rollouts if rollout.episode is not None]
    ratio = (played.sampled_tokens / played.seconds) / (replayed.sampled_tokens / replayed.seconds)
    return {
        "env_s_per_turn": round(sum(episode.env_s for episode in episodes) / len(episodes) / bench.turns, 4),
        "failed": sum(episode.failure is not None for episode in episodes),
        "throughput_lost": round(1.0 - ratio, 4),
    }


def _agent_settings(config: AgentsBench) -> AgentEngineSettings:
    bench = config.bench
    context_len = _MESSAGE_TOKENS + bench.turns * (bench.response_tokens + _MESSAGE_TOKENS)
    agent = config.agent.model_copy(update={"max_turns": bench.turns, "context_len": context_len})
    engine = EngineSettings(
        model=config.actor.model_name_or_path,
        vllm=config.vllm,
        columns=Columns(),
        trust_remote_code=config.actor.trust_remote_code,
        dtype=config.ds.param_dtype,
        max_model_len=context_len,
        top_p=1.0,
        name="vllm",
        demand=Demand(bench.episodes, bench.episodes, context_len),
    )
    environments = EnvironmentSettings(spec=_ENVIRONMENT, agent=agent, columns=Columns(), log=None)
    return AgentEngineSettings(engine=engine, environments=environments, share=put)


def _build_engine(settings: AgentEngineSettings) -> BenchEngine:
    from vlmrl.commands.bench.conversations import BenchEngine  # imports torch, in the engine's process only

    return BenchEngine(settings)


def _episodes(bench: Conversations) -> list[Prompt]:
    """Rows for the environment, which makes the prompts."""
    nothing = np.zeros(0, dtype=np.int64)
    metadata = {"step_s": bench.step_s, "turns": bench.turns}
    return [
        Prompt(i, f"episodes:{i}", "", nothing, nothing, label=None, metadata=metadata) for i in range(bench.episodes)
    ]


@contextmanager
def _session(roles: list[Role], *, shares: bool = True) -> Iterator[tuple[RoleBuilder, Session]]:
    with session() as machines, ExitStack() as stack:
        shared = [frozenset(role.name for role in roles)] if shares else []
        places = plan(roles, shared=shared, available=machines.slots, unit=machines.unit)
        builder = RoleBuilder(machines, places, stack)
        with builder.running():
            yield builder, machines


def _engines(
    builder: RoleBuilder,
    config: SyncBench | RolloutBench,
    columns: Columns,
    *,
    max_model_len: int,
    adapter: AdapterPlan | None = None,
) -> RemoteEngines:
    group = builder.group(
        "vllm",
        EngineSettings(
            model=config.actor.model_name_or_path,
            vllm=config.vllm,
            columns=columns,
            trust_remote_code=config.actor.trust_remote_code,
            dtype=config.ds.param_dtype,
            max_model_len=max_model_len,
            top_p=1.0,
            name="vllm",
            adapter=adapter,
            demand=demand(config) if isinstance(config, RolloutBench) else None,
        ).build,
        timeout_s=max(config.vllm.start_timeout_s, 3600),
        concurrent=True,
    )
    return RemoteEngines(group, timeout_s=config.vllm.generate_timeout_s, sleeps=False)


def _rounded(metrics: Metrics) -> Metrics:
    """Metrics as fields of a line."""
    return {name.removeprefix("sync/"): round(value, 4) for name, value in metrics.items()}


def _print(machines: Session, **fields: Any) -> None:
    print_json(**fields, device=f"{sum(machines.slots)} x {machines.unit}")
