"""The memory plan: roles, shared memory, and the error when a run does not fit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vlmrl.commands.memory import GIB, Machine, MemoryPlan, _most_pixels, largest_pack, memory_plan, show
from vlmrl.config.data import Columns
from vlmrl.config.load import load
from vlmrl.config.stages import DpoConfig, RmConfig, SftConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ClusterError
from vlmrl.models.load import skeleton
from vlmrl.plugins import processor, processor_of

HOST = Machine("cpu", 64.0 * GIB, 64.0 * GIB)
GPU = Machine("cuda", 80.0 * GIB, 256.0 * GIB)
SMALL_STEP = "--rollout.batch_size 2 --rollout.n_samples_per_prompt 4 --train.batch_size 8"


def rl(folder: Path, line: str = "") -> RlConfig:
    words = f"--actor.model_name_or_path {folder} --data.prompt_dataset d {SMALL_STEP} {line}"
    return load(RlConfig, words.split())


def names(plan: MemoryPlan) -> list[tuple[str, int]]:
    return [(role.name, count) for role, count in plan.roles]


def test_the_roles_are_those_that_the_run_starts(folder: Callable[..., Path]) -> None:
    model = folder("qwen3")
    assert names(memory_plan(rl(model, "--vllm.num_engines 2"), HOST)) == [("actor", 1), ("vllm", 2)]
    kl = "--algo.kl.init_coef 0.1"
    assert names(memory_plan(rl(model, f"{kl} --ref.num_gpus_per_node 2"), HOST)) == [
        ("actor", 1),
        ("ref", 2),
        ("vllm", 1),
    ]
    distill = f"--algo.distill.teacher_model_name_or_path {model}"
    assert names(memory_plan(rl(model, f"{kl} {distill} --algo.distill.num_gpus_per_node 2"), HOST)) == [
        ("actor", 1),
        ("ref", 1),
        ("teacher", 2),
        ("vllm", 1),
    ]
    # The actor with its adapters off is the reference.
    assert names(memory_plan(rl(model, f"{kl} --ds.lora.rank 4"), HOST)) == [("actor", 1), ("vllm", 1)]
    sft = load(SftConfig, ["--actor.model_name_or_path", str(model), "--data.prompt_dataset", "d"])
    assert names(memory_plan(sft, HOST)) == [("actor", 1)]
    rm = load(RmConfig, ["--actor.model_name_or_path", str(model), "--data.prompt_dataset", "d"])
    assert names(memory_plan(rm, HOST)) == [("actor", 1)]
    words = f"--actor.model_name_or_path {model} --data.prompt_dataset d --sft.teacher_model_name_or_path {model}"
    ((taught, count),) = memory_plan(load(SftConfig, words.split()), HOST).roles
    parts = {part.name: part.num_bytes for part in taught.parts}
    assert (count, parts["teacher"]) == (1, parts["weights"])
    words = f"--actor.model_name_or_path {model} --data.prompt_dataset d --eval.dataset e --eval.generate_enable true"
    assert names(memory_plan(load(SftConfig, words.split()), HOST)) == [("actor", 1), ("vllm", 1)]
    sharing = load(SftConfig, [*words.split(), "--train.colocate_all"])
    assert [share.name for share in memory_plan(sharing, GPU).shares] == ["a GPU of actor and vllm", "main memory"]


def test_a_pair_of_responses_is_one_pack_at_least(folder: Callable[..., Path]) -> None:
    def longest(kind: str) -> int:
        words = ["--actor.model_name_or_path", str(folder("qwen3")), "--data.prompt_dataset", "d", "--rm.kind", kind]
        config = load(RmConfig, [*words, "--train.max_tokens_per_gpu", "64", "--data.max_len", "100"])
        return largest_pack(config, processor(str(folder("qwen3")), min_pixels=3136, max_pixels=100_000), 1)[0]

    assert (longest("outcome"), longest("process")) == (200, 100)


def test_ranks_that_share_tokens_have_packs_of_their_common_budget(folder: Callable[..., Path]) -> None:
    def sft(line: str) -> SftConfig:
        words = f"--actor.model_name_or_path {folder('qwen3')} --data.prompt_dataset d --actor.num_gpus_per_node 4"
        return load(SftConfig, f"{words} --data.max_len 100 --train.batch_size 64 {line}".split())

    def largest(config: SftConfig) -> int:
        reader = processor(str(folder("qwen3")), min_pixels=3136, max_pixels=100_000)
        return largest_pack(config, reader, 4, sequence_size=config.ds.sequence_parallel_size)[0]

    def activations(config: SftConfig) -> float:
        ((actor, _),) = memory_plan(config, GPU).roles
        return next(part.num_bytes for part in actor.parts if part.name == "activations")

    alone, shared = (
        sft("--train.max_tokens_per_gpu 300"),
        sft("--train.max_tokens_per_gpu 300 --ds.sequence_parallel_size 2"),
    )
    # Two groups of two ranks: packs of 600 tokens, 300 on each rank, as without sharing.
    assert (largest(alone), largest(shared)) == (300, 600)
    # The only key head, of 32 channels, is repeated: its keys and values in bf16, in two layers.
    assert activations(shared) == activations(alone) + 300 * 2 * 2 * 2 * 32
    # Every rank encodes all images of a pack, and so they count for each.
    reader = processor(str(folder("qwen2_5_vl")), min_pixels=3136, max_pixels=12544)
    patches = [largest_pack(config, reader, 4, sequence_size=size)[1] for size, config in ((1, alone), (2, shared))]
    assert patches[0] == patches[1] > 0
    # A sequence above the budget is halved.
    alone, shared = (sft(f"--train.max_tokens_per_gpu 50 --ds.sequence_parallel_size {size}") for size in (1, 2))
    assert (largest(alone), largest(shared)) == (100, 100)
    half = sft("--train.max_tokens_per_gpu 50 --data.max_len 50")
    assert activations(shared) == activations(half) + 50 * 2 * 2 * 2 * 32 < activations(alone)


def test_preferences_have_a_reference_unless_it_is_the_base_or_computed_before(folder: Callable[..., Path]) -> None:
    def dpo(line: str = "") -> DpoConfig:
        return load(DpoConfig, f"--actor.model_name_or_path {folder('qwen3')} --data.prompt_dataset d {line}".split())

    assert names(memory_plan(dpo("--ref.num_gpus_per_node 2"), HOST)) == [("actor", 1), ("ref", 2)]
    for line in ("--dpo.precompute_reference", "--ds.lora.rank 4", "--dpo.loss orpo"):
        assert names(memory_plan(dpo(line), HOST)) == [("actor", 1)]
    small = dpo("--train.batch_size 1 --data.max_len 100 --train.max_tokens_per_gpu 50")
    # Both responses of a pair are in one pack.
    assert largest_pack(small, processor_of(small.actor.model_name_or_path, small.data), 1) == (200, 0)


def test_image_features_are_counted_where_they_are_kept(folder: Callable[..., Path]) -> None:
    model = folder("qwen2_5_vl")

    def parts(line: str) -> set[str]:
        (trainer, _), *_ = memory_plan(rl(model, line), HOST).roles
        return {part.name for part in trainer.parts}

    assert "vision cache" not in parts("")
    assert "vision cache" in parts("--actor.freeze_visual_encoder --actor.freeze_projector")
    assert "vision cache" in parts("--ds.lora.rank 4")
    assert "vision cache" not in parts("--ds.lora.rank 4 --ds.lora.target_modules all")
    assert "adapters" in parts("--ds.lora.rank 4 --ds.load_in_4bit")


def test_the_largest_pack_is_bounded_by_the_budget_and_by_the_step(folder: Callable[..., Path]) -> None:
    reader = processor(str(folder("qwen2_5_vl")), min_pixels=3136, max_pixels=1003520)
    shape = "--data.max_len 100 --rollout.max_new_tokens 25"
    config = rl(folder("qwen2_5_vl"), f"{shape} --train.max_tokens_per_gpu 600")
    # Prompts of 100 image tokens, 4 patches each, and four answers of 25 tokens behind each of them.
    assert largest_pack(config, reader, 1) == (600, 600 * 400 // 200)
    # Two ranks have four samples each of 125 tokens at most.
    assert largest_pack(config, reader, 2)[0] == 500
    # Every sample has the prompt to itself.
    packed = rl(folder("qwen2_5_vl"), f"{shape} --train.max_tokens_per_gpu 600 --train.layout packed")
    assert largest_pack(packed, reader, 1) == (600, 600 * 400 // 125)
    # One sample is taken whatever the budget.
    assert largest_pack(rl(folder("qwen2_5_vl"), f"{shape} --train.max_tokens_per_gpu 50"), reader, 1)[0] == 125
    text = processor(str(folder("qwen3")), min_pixels=3136, max_pixels=1003520)
    assert largest_pack(config, text, 1) == (600, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--vllm.cpu_kv_cache_gib 100",
            r"largest part is KV cache of vllm, 100\.0 GiB: lower vllm\.cpu_kv_cache_gib",
        ),
        (
            "--vision.cache_gib 100 --ds.lora.rank 4",
            r"largest part is vision cache of actor, 100\.0 GiB: lower vision\.cache_gib",
        ),
        (
            "--train.max_tokens_per_gpu 100000000 --train.batch_size 100000 --rollout.batch_size 25000",
            r"largest part is activations of actor.*gradient_checkpointing_enable, or lower .*_parallel_size",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_flag_to_change(
    line: str, message: str, folder: Callable[..., Path]
) -> None:
    plan = memory_plan(rl(folder("qwen2_5_vl"), line), HOST)
    with pytest.raises(ClusterError, match=rf"^main memory: the run takes about .* of 64\.0; the {message}$"):
        plan.check()


def test_a_cache_that_holds_no_sequence_is_refused(folder: Callable[..., Path]) -> None:
    # The micro model has 2 layers and 1 key head of 32 channels: 2 x 2 x 32 numbers of 2 bytes for each of 3072 tokens.
    plan = memory_plan(rl(folder("qwen3")), HOST)
    assert plan.sequence_bytes == 2 * 2 * 32 * 2 * 3072
    tiny_cache = memory_plan(rl(folder("qwen3"), "--vllm.cpu_kv_cache_gib 0.0001"), HOST)
    with pytest.raises(ClusterError, match=r"one sequence of data\.max_len .*vllm\.cpu_kv_cache_gib"):
        tiny_cache.check()


def test_what_fits_passes(folder: Callable[..., Path]) -> None:
    memory_plan(rl(folder("qwen3")), HOST).check()
    memory_plan(rl(folder("qwen3")), GPU).check()


def test_on_gpus_each_role_has_its_own_memory_unless_colocated(folder: Callable[..., Path]) -> None:
    model = folder("qwen3")
    alone = memory_plan(rl(model), GPU)
    assert [share.name for share in alone.shares] == ["a GPU of actor", "a GPU of vllm", "main memory"]
    colocated = "--train.colocate_all --vllm.gpu_memory_utilization 1.0"
    with pytest.raises(ClusterError, match=r"a GPU of actor and vllm: .* lower vllm\.gpu_memory_utilization"):
        memory_plan(rl(model, colocated), GPU).check()
    with pytest.raises(ClusterError, match=r"a GPU of actor and vllm"):
        # The actor gives back what its passes take, and keeps its weights beside the engine.
        memory_plan(rl(model, f"{colocated} --vllm.enable_sleep"), GPU).check()
    # They take turns.
    passes = "--train.colocate_all --vllm.gpu_memory_utilization 0.95 --train.max_tokens_per_gpu 4000000"
    long = "--data.max_len 4000000 --actor.gradient_checkpointing_enable"
    with pytest.raises(ClusterError, match=r"a GPU of actor and vllm"):
        memory_plan(rl(model, f"{passes} {long}"), GPU).check()
    memory_plan(rl(model, f"{passes} {long} --vllm.enable_sleep"), GPU).check()


def test_sleeping_roles_move_from_the_gpu_to_main_memory(folder: Callable[..., Path]) -> None:
    model = folder("qwen3")
    colocated = "--train.colocate_all --vllm.enable_sleep --vllm.gpu_memory_utilization 0.5"
    awake, asleep = (memory_plan(rl(model, f"{colocated} {more}"), GPU) for more in ("", "--ds.enable_sleep"))
    weights, optimizer = part(awake, "actor", "weights"), part(awake, "actor", "optimizer")
    # While the engine is awake the actor keeps its weights, and with them an optimizer that does not sleep.
    assert awake.shares[0].needed == 40 * GIB + weights + optimizer
    assert asleep.shares[0].needed == 40 * GIB + weights
    # The micro model has no block of 10 MiB: nothing is rounded up.
    pinned = part(awake, "vllm", "asleep, pinned")
    assert pinned == part(awake, "vllm", "weights") > 0
    assert asleep.shares[-1].needed - awake.shares[-1].needed == optimizer
    alone = memory_plan(rl(model, "--train.colocate_all --vllm.gpu_memory_utilization 0.5"), GPU)
    assert awake.shares[-1].needed - alone.shares[-1].needed == pinned


def test_on_gpu_machines_main_memory_holds_the_image_features(folder: Callable[..., Path]) -> None:
    plan = memory_plan(rl(folder("qwen2_5_vl"), "--vision.cache_gib 300 --ds.lora.rank 4"), GPU)
    with pytest.raises(ClusterError, match=r"^main memory: .*vision cache of actor"):
        plan.check()


def test_the_plan_is_printed_before_it_is_refused(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(rl(folder("qwen3"))) == 0
    assert "activations" in capsys.readouterr().out
    with pytest.raises(ClusterError):
        show(rl(folder("qwen3"), "--vllm.cpu_kv_cache_gib 100000"))
    assert "KV cache" in capsys.readouterr().out


def test_json_has_the_bytes(folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    show(rl(folder("qwen3")), as_json=True)
    plan_json = json.loads(capsys.readouterr().out)
    (cache,) = (part for part in plan_json["roles"][1]["parts"] if part["name"] == "KV cache")
    assert (plan_json["device"], cache["num_bytes"]) == ("cpu", GIB)


def test_a_plan_counts_every_process(folder: Callable[..., Path]) -> None:
    one, two = (memory_plan(rl(folder("qwen3"), f"--vllm.num_engines {n}"), HOST).shares[0].needed for n in (1, 2))
    engine = two - one
    plan = memory_plan(rl(folder("qwen3")), HOST)
    (share,) = plan.shares
    replace(plan, shares=(replace(share, available=share.needed),)).check()
    with pytest.raises(ClusterError):
        replace(plan, shares=(replace(share, available=share.needed - 1),)).check()
    assert engine == pytest.approx(plan.roles[1][0].num_bytes())


GAE = "--algo.advantage.estimator gae"


def part(plan: MemoryPlan, role: str, name: str) -> float:
    (role_memory,) = (held for held, _ in plan.roles if held.name == role)
    return sum(part.num_bytes for part in role_memory.parts if part.name == name)


def test_critic_and_reward_models_are_roles_with_their_own_ranks(folder: Callable[..., Path]) -> None:
    model = folder("qwen3")
    line = f"{GAE} --critic.num_gpus_per_node 2 --reward.model_name_or_path {model} --reward.num_gpus_per_node 3"
    plan = memory_plan(rl(model, f"{line} --reward.process_model_name_or_path {model}"), HOST)
    assert names(plan) == [("actor", 1), ("critic", 2), ("reward_model", 3), ("process_model", 3), ("vllm", 1)]
    # A reward model has no gradients.
    assert part(plan, "reward_model", "gradients") == 0
    assert part(plan, "critic", "optimizer") > 0


def test_a_critic_has_a_score_layer_instead_of_an_output_layer(folder: Callable[..., Path]) -> None:
    model = folder("qwen3")
    plan = memory_plan(rl(model, f"{GAE} --ds.param_dtype fp32"), HOST)
    net = skeleton(str(model))
    head = net.get_output_embeddings().weight
    gone = 0 if head is net.get_input_embeddings().weight else head.numel()
    hidden = net.config.get_text_config().hidden_size
    assert part(plan, "critic", "weights") == part(plan, "actor", "weights") + 4 * (hidden - gone)
    # It computes no logits.
    assert part(plan, "critic", "activations") <= part(plan, "actor", "activations")


def test_a_critic_in_the_actors_processes_takes_turns_with_it(folder: Callable[..., Path]) -> None:
    frozen = "--actor.freeze_visual_encoder --actor.freeze_projector"
    apart = memory_plan(rl(folder("qwen2_5_vl"), f"{GAE} {frozen}"), HOST)
    within = memory_plan(rl(folder("qwen2_5_vl"), f"{GAE} {frozen} --train.colocate_actor_critic"), HOST)
    for name in ("gradients", "activations", "vision cache", "process"):
        assert part(apart, "critic", name) > 0 == part(within, "critic", name), name
    for name in ("weights", "optimizer"):
        assert part(apart, "critic", name) == part(within, "critic", name) > 0, name


def test_on_gpus_roles_that_share_them_are_added_up(folder: Callable[..., Path]) -> None:
    model = folder("qwen3")
    scorer = f"--reward.model_name_or_path {model}"

    def shares(line: str) -> list[str]:
        return [share.name.removeprefix("a GPU of ") for share in memory_plan(rl(model, line), GPU).shares]

    assert shares(f"{GAE} {scorer}") == ["actor", "reward_model", "critic", "vllm", "main memory"]
    assert shares(f"{GAE} --train.colocate_actor_critic") == ["actor and critic", "vllm", "main memory"]
    assert shares(f"{GAE} {scorer} --train.colocate_critic_reward") == [
        "actor",
        "critic and reward_model",
        "vllm",
        "main memory",
    ]
    assert shares(f"{GAE} {scorer} --train.colocate_all") == [
        "actor and critic and reward_model and vllm",
        "main memory",
    ]


def test_an_offloaded_reward_model_is_in_main_memory(folder: Callable[..., Path]) -> None:
    model = folder("qwen3")
    line = f"--reward.model_name_or_path {model}"
    stays, goes = (memory_plan(rl(model, f"{line} {more}"), GPU) for more in ("", "--reward.offload"))
    weights = part(stays, "reward_model", "weights")
    beside = [plan.shares[-1].needed for plan in (stays, goes)]
    assert beside[1] - beside[0] == pytest.approx(weights)
    assert weights > 0


def test_a_moving_average_takes_its_place(folder: Callable[..., Path]) -> None:
    model = folder("qwen3")
    assert part(memory_plan(rl(model), HOST), "actor", "moving average") == 0
    numbers = sum(parameter.numel() for parameter in skeleton(str(model)).parameters())
    plan = memory_plan(rl(model, "--train.enable_ema"), HOST)
    assert part(plan, "actor", "moving average") == 4 * numbers
    # Two ranks have one of them together.
    two = memory_plan(rl(model, "--train.enable_ema --actor.num_gpus_per_node 2"), HOST)
    assert part(two, "actor", "moving average") == 2 * numbers


def test_the_critics_memory_is_shown_with_its_flags(folder: Callable[..., Path]) -> None:
    wide = "--train.max_tokens_per_gpu 100000000 --train.batch_size 100000 --rollout.batch_size 25000"
    line = f"{GAE} {wide} --actor.gradient_checkpointing_enable --critic.gradient_checkpointing_enable false"
    with pytest.raises(ClusterError, match=r"activations of critic.*set critic\.gradient_checkpointing_enable"):
        memory_plan(rl(folder("qwen2_5_vl"), line), HOST).check()


def test_videos_count_half_of_their_pixels() -> None:
    # 8 images of a million pixels, and with a column of videos one of 768 frames, bounded by its total.
    assert _most_pixels(Columns()) == 8 * 1_003_520
    assert _most_pixels(Columns(video_key="videos")) == 8 * 1_003_520 + 90_316_800
    few = Columns(video_key="videos", fps_max_frames=4, video_max_pixels=200_000, max_videos_per_prompt=2)
    assert _most_pixels(few) == 8 * 1_003_520 + 2 * 4 * 200_000 // 2
