"""Contradictions between settings, unread settings, and defaults."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from vlmrl.config import names
from vlmrl.config.bench_verbs import AsyncBench, RolloutBench, SyncBench
from vlmrl.config.stages import SftConfig
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.config.vllm import Vllm


def nest(values: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for name, value in values.items():
        node = root
        *parts, last = name.split(".")
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value
    return root


def rl(**values: Any) -> RlConfig:
    return RlConfig.model_validate(nest({"actor.model_name_or_path": "m", "data.prompt_dataset": "d"} | values))


def sft(**values: Any) -> SftConfig:
    return SftConfig.model_validate(nest({"actor.model_name_or_path": "m", "data.prompt_dataset": "d"} | values))


def test_the_defaults_agree_with_each_other() -> None:
    rl()
    sft()
    EvalConfig.model_validate(nest({"actor.model_name_or_path": "m", "eval.dataset": "d"}))
    SyncBench.model_validate(nest({"actor.model_name_or_path": "m"}))
    RolloutBench.model_validate(nest({"actor.model_name_or_path": "m", "data.prompt_dataset": "d"}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout.n_samples_per_prompt": 1}, "use 2 or more"),
        ({"rollout.n_samples_per_prompt": 1, "algo.advantage.estimator": "rloo"}, "estimator rloo without a group"),
        (
            {"rollout.batch_size": 10, "rollout.n_samples_per_prompt": 4, "train.batch_size": 16},
            r"train.batch_size 16 does not divide the 40 responses of a step",
        ),
        (
            {"rollout.batch_size": 6, "rollout.n_samples_per_prompt": 4, "train.batch_size": 6},
            "train.batch_size 6 is not a multiple of rollout.n_samples_per_prompt 4",
        ),
        ({"rollout.top_p": 0.9, "rollout.temperature": 0.8}, "rollout.top_p 0.9 needs rollout.temperature 1, not 0.8"),
        ({"vllm.enable_sleep": True}, "needs train.colocate_all"),
        ({"ds.enable_sleep": True}, "ds.enable_sleep frees memory .* needs train.colocate_all"),
        *(
            ({"ds.enable_sleep": True, "train.colocate_all": True, **more}, message)
            for more, message in (
                ({"ds.zero_stage": 3}, "cannot move the optimizer with ds.zero_stage 3: set it to 2"),
                ({"ds.zero_stage": 1}, "cannot move the optimizer with ds.zero_stage 1: set it to 2"),
                ({"ds.adam_offload": True}, "always keeps the optimizer's state in CPU memory"),
                ({"actor.optim": "adam_paged"}, "cannot move adam_paged"),
                (
                    {"algo.advantage.estimator": "gae", "critic.zero_stage": 3},
                    "cannot move the optimizer with critic.zero_stage 3: set it to 2",
                ),
            )
        ),
        ({"vllm.sync_backend": "ipc"}, "within a GPU: it needs train.colocate_all"),
        ({"vllm.sync_backend": "nccl", "train.colocate_all": True}, "on the same GPU.* use ipc or shm"),
        ({"ds.packing_samples": True, "train.layout": "padded"}, "ds.packing_samples true means train.layout shared"),
        ({"ds.packing_samples": False, "train.layout": "packed"}, "ds.packing_samples false means train.layout padded"),
        ({"ds.attn_implementation": "sdpa"}, "sdpa does not support prompts that responses share: set train.layout"),
        ({"ds.attn_implementation": "eager", "ds.packing_samples": True}, "eager does not support prompts"),
        ({"ds.adam_offload": True, "ds.zero_stage": 0}, "set ds.zero_stage to 1, 2 or 3"),
        ({"vllm.quantization": "fp8"}, "needs importance correction: set algo.advantage.is_correction_enable"),
        (
            {
                "vllm.quantization": "fp8",
                "algo.advantage.is_correction_enable": True,
                "ds.param_dtype": "fp32",
            },
            "needs activations of half precision: set ds.param_dtype bf16",
        ),
        (
            {
                "vllm.quantization": "fp8",
                "algo.advantage.is_correction_enable": True,
                "ds.lora.rank": 4,
            },
            "adapters that are synced without the base is not built",
        ),
        ({"ds.offload": "cpu", "ds.adam_offload": True}, "moves shards of weights, which only ds.zero_stage 3 makes"),
        ({"ds.offload": "cpu", "ds.zero_stage": 3}, "the optimizer 12 on it: set ds.adam_offload too"),
        (
            {
                "ds.offload": "cpu",
                "ds.zero_stage": 3,
                "ds.adam_offload": True,
                "algo.advantage.estimator": "gae",
                "critic.zero_stage": 2,
            },
            "which only critic.zero_stage 3 makes, not 2",
        ),
        (
            {
                "ds.offload": "cpu",
                "ds.zero_stage": 3,
                "ds.adam_offload": True,
                "ds.load_in_4bit": True,
                "ds.lora.rank": 4,
            },
            "ds.offload cpu with ds.load_in_4bit is not built",
        ),
        (
            {"ds.sequence_parallel_size": 2, "actor.num_gpus_per_node": 3},
            "ds.sequence_parallel_size 2 does not divide the 3 ranks of actor.num_nodes x actor.num_gpus_per_node: use",
        ),
        ({"ds.sequence_parallel_size": 2}, "does not divide the 1 rank of actor"),
        (
            {
                "ds.sequence_parallel_size": 4,
                "actor.num_gpus_per_node": 2,
                "actor.num_nodes": 2,
                "algo.advantage.estimator": "gae",
                "critic.num_gpus_per_node": 2,
            },
            "4 does not divide the 2 ranks of critic.num_nodes x critic.num_gpus_per_node",
        ),
        *(
            (
                {
                    "ds.sequence_parallel_size": 2,
                    "actor.num_gpus_per_node": 2,
                    "train.layout": "packed",
                    "ds.attn_implementation": attention,
                },
                f"{attention} would let the samples of a pack attend to each other",
            )
            for attention in ("sdpa", "eager")
        ),
        ({"ds.expert_parallel_size": 2}, "ds.expert_parallel_size 2 does not divide the 1 rank of actor"),
        *(
            (
                {"ds.expert_parallel_size": 2, "actor.num_gpus_per_node": 2, **more},
                f"ds.expert_parallel_size 2 {message}",
            )
            for more, message in (
                ({"ds.zero_stage": 0}, "needs ds.zero_stage 1, 2 or 3"),
                (
                    {"algo.advantage.estimator": "gae", "critic.num_gpus_per_node": 2, "critic.zero_stage": 0},
                    "needs critic.zero_stage 1, 2 or 3",
                ),
                ({"actor.optim": "muon"}, "is not built yet for actor.optim muon"),
                ({"ds.lora.rank": 4}, "spreads trained experts"),
                ({"ds.sequence_parallel_size": 2}, "is not built yet for ds.sequence_parallel_size 2"),
                ({"ds.adam_offload": True}, "is not built yet for ds.adam_offload"),
                ({"ds.enable_sleep": True, "train.colocate_all": True}, "is not built yet for ds.enable_sleep"),
            )
        ),
        ({"reward.overlong_buffer_len": 200, "rollout.max_new_tokens": 100}, "longer than the longest response"),
        ({"reward.functions": {}}, "there is no reward"),
        ({"reward.functions": {"maths": 1.0}}, "there are math, exact, format"),
        (
            {"reward.remote_url": "http://host/score,reward.py:f"},
            "one path/to/file.py:function, or one or several URLs",
        ),
        ({"reward.clip_range": (1.0, -1.0)}, "give the smaller bound first"),
        ({"data.min_pixels": 10, "data.max_pixels": 9}, "data.min_pixels 10 is above data.max_pixels 9"),
        (
            {"data.prompt_dataset": "a,b", "data.prompt_probs": (0.5,)},
            "1 values for the 2 datasets",
        ),
        ({"algo.kl.init_coef": 0.1, "algo.kl.use_loss": True}, "use k2 or k3"),
        ({"ckpt.save_steps": 0}, "above 0, or -1 for never"),
        ({"actor.model_name_or_path": ""}, "at least 1 character"),
        ({"actor.adam.lr": float("inf")}, "finite number"),
    ],
)
def test_a_contradiction_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rl(**values)


def test_ranks_that_share_tokens_have_no_teacher_in_their_process() -> None:
    two = {"ds.sequence_parallel_size": 2, "actor.num_gpus_per_node": 2}
    sft(**two)
    with pytest.raises(ValidationError, match=r"leave it or sft\.teacher_model_name_or_path out"):
        sft(**two, **{"sft.teacher_model_name_or_path": "t"})


UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"ref.num_gpus_per_node": 1}, "algo.kl.init_coef is 0"),
    ({"algo.kl.estimator": "k1"}, "algo.kl.init_coef is 0"),
    ({"train.colocate_actor_ref": True}, "algo.kl.init_coef is 0"),
    (
        {"train.colocate_actor_ref": True, "train.colocate_all": True, "algo.kl.init_coef": 0.1},
        "colocate_all includes it",
    ),
    ({"algo.advantage.gamma": 1.0}, "not with group_norm"),
    ({"algo.advantage.no_std_norm": True, "algo.advantage.estimator": "dr_grpo"}, "not with dr_grpo"),
    ({"reward.overlong_penalty_factor": 0.5}, "without reward.overlong_buffer_len"),
    (
        {"reward.clip_range": (-1.0, 1.0), "train.agent_func_path": "my_env.py:make"},
        "rewards of an environment are not clipped",
    ),
    ({"reward.remote_weight": 2.0}, "there is no reward.remote_url"),
    ({"actor.min_lr_ratio": 0.1, "actor.lr_scheduler": "linear"}, "cosine_with_min_lr has a floor"),
    ({"actor.lr_warmup_ratio": 0.1, "actor.lr_scheduler": "constant"}, "does not warm up"),
    ({"actor.eps_clip": 0.2, "actor.eps_clip_low_high": (0.2, 0.3)}, "replaces it"),
    ({"actor.gradient_checkpointing_reentrant": True}, "gradient_checkpointing_enable is off"),
    ({"data.input_template": "Q: {}"}, "data.apply_chat_template is on"),
    ({"eval.steps": 5}, "nothing is evaluated without eval.dataset"),
    ({"ckpt.max_num": 2}, "ckpt.save_steps is -1"),
    ({"logger.wandb.run_name": "a"}, "without logger.wandb.project"),
    ({"logger.mlflow.run_name": "a"}, "without logger.mlflow.experiment"),
    ({"logger.trackio.run_name": "a"}, "without logger.trackio.project"),
    ({"logger.swanlab.org": "a"}, "without logger.swanlab.project"),
    ({"ds.overlap_comm": True, "ds.zero_stage": 0}, "ds.zero_stage 0"),
    ({"vision.cache_gib": 1.0}, "actor.freeze_visual_encoder and actor.freeze_projector are not both on"),
    ({"vision.cache_gib": 1.0, "actor.freeze_visual_encoder": True}, "are not both on"),
    ({"vision.cache_gib": 1.0, "ds.lora.rank": 8, "ds.lora.target_modules": ("vision",)}, "include the tower"),
    ({"vision.cache_gib": 1.0, "ds.lora.rank": 8, "ds.lora.target_modules": ("all",)}, "include the tower"),
    ({"ds.lora.alpha": 8.0}, "ds.lora.rank is 0"),
    ({"ds.lora.target_modules": ("all",)}, "ds.lora.rank is 0"),
    ({"actor.adapter_name_or_path": "a"}, "ds.lora.rank is 0"),
    ({"ds.quant_storage": "uint8", "ds.lora.rank": 8}, "ds.load_in_4bit is off"),
    ({"vllm.qlora_base": "original", "ds.lora.rank": 8}, "ds.load_in_4bit is off"),
    (
        {"vllm.qlora_base": "original", "ds.lora.rank": 8, "ds.load_in_4bit": True, "ds.lora.use_dora": True},
        "ds.lora.use_dora makes the engines hold merged weights",
    ),
    ({"ref.num_nodes": 1, "ds.lora.rank": 8, "algo.kl.init_coef": 0.1}, "the actor with its adapters off"),
    ({"train.colocate_actor_ref": True, "ds.lora.rank": 8, "algo.kl.init_coef": 0.1}, "with its adapters off"),
    ({"data.output_key": "answer"}, "vlmrl rl does not have it"),
]


@pytest.mark.parametrize(
    "values",
    [
        {"eval.steps": -1},
        {"train.colocate_actor_ref": False},
        {
            "algo.kl.init_coef": 0.0,
            "ref.num_gpus_per_node": 8,
            "ref.model_name_or_path": "r",
            "algo.kl.estimator": "k3",
        },
        {"algo.kl.target": None},
        {"eval.dataset": None, "eval.n_samples_per_prompt": 4},
        {"ckpt.save_steps": -1, "ckpt.max_num": 3},
        {"ds.lora.rank": 0, "ds.lora.alpha": 16.0, "ds.lora.dropout": 0.0},
        {"logger.wandb.project": None, "logger.wandb.run_name": "a"},
        {"vision.cache_gib": 0.0},
    ],
)
def test_values_that_are_off_or_switched_off_are_accepted(values: dict[str, Any]) -> None:
    for name, given in values.items():
        assert names.setting_value(rl(**values), name) == given


@pytest.mark.parametrize(("values", "message"), UNREAD)
def test_a_setting_that_would_not_be_read_is_refused(values: dict[str, Any], message: str) -> None:
    name = next(iter(values))
    with pytest.raises(ValidationError, match=rf"{name} would not be read: .*{message}"):
        rl(**values)


def test_a_setting_is_accepted_once_it_is_read() -> None:
    rl(**{"algo.kl.init_coef": 0.1, "ref.num_gpus_per_node": 2, "train.colocate_actor_ref": True})
    rl(**{"algo.advantage.estimator": "reinforce_baseline", "algo.advantage.gamma": 0.9})
    rl(**{"reward.overlong_buffer_len": 10, "reward.overlong_penalty_factor": 0.5})
    rl(**{"reward.remote_url": "a.py:f", "reward.remote_weight": 2.0, "reward.functions": {}})
    for others in ({"reward.functions": {"math": 1.0}}, {"reward.stop_properly_penalty_coef": -20.0}):
        rl(**{"reward.clip_range": (-1.0, 1.0), "train.agent_func_path": "my_env.py:make", **others})
    rl(**{"data.apply_chat_template": False, "data.input_template": "Q: {}"})
    rl(**{"vllm.enable_sleep": True, "train.colocate_all": True})
    rl(**{"vllm.enable_sleep": True, "ds.enable_sleep": True, "train.colocate_all": True})
    rl(**{"vllm.sync_backend": "ipc", "train.colocate_all": True})
    rl(**{"vllm.sync_backend": "nccl"})
    rl(**{"rollout.top_p": 0.9})
    rl(**{"vision.cache_gib": 1.0, "actor.freeze_visual_encoder": True, "actor.freeze_projector": True})
    rl(**{"vision.cache_gib": 1.0, "algo.kl.init_coef": 0.1})
    rl(**{"vision.cache_gib": 1.0, "ds.lora.rank": 8})
    rl(**{"ds.lora.rank": 8, "ds.lora.alpha": 32.0, "actor.adapter_name_or_path": "a"})
    rl(**{"ds.lora.rank": 8, "algo.kl.init_coef": 0.1, "ref.model_name_or_path": "m", "ref.num_nodes": 1})
    rl(**{"ds.lora.rank": 8, "ds.load_in_4bit": True, "ds.quant_storage": "uint8", "vllm.qlora_base": "original"})
    for_tower = {
        "ds.lora.target_modules": ("all",),
        "actor.freeze_visual_encoder": True,
        "actor.freeze_projector": True,
    }
    rl(**{"ds.lora.rank": 8, "vision.cache_gib": 1.0, **for_tower})
    for layout in ("packed", "padded"):
        rl(**{"ds.attn_implementation": "sdpa", "train.layout": layout})
    rl(**{"ds.attn_implementation": "sdpa", "ds.packing_samples": False})


def test_all_contradictions_are_reported_together() -> None:
    with pytest.raises(ValidationError) as caught:
        rl(**{"rollout.n_samples_per_prompt": 1, "vllm.enable_sleep": True, "algo.advantage.gamma": 0.5})
    message = str(caught.value)
    assert all(part in message for part in ("use 2 or more", "colocate_all", "algo.advantage.gamma would not be read"))


@pytest.mark.parametrize(("packing", "layout"), [(None, "shared"), (True, "shared"), (False, "padded")])
def test_openrlhfs_flag_sets_the_layout(packing: bool | None, layout: str) -> None:
    assert rl(**{"ds.packing_samples": packing}).train.layout == layout
    assert sft(**{"ds.packing_samples": packing, "train.layout": layout}).train.layout == layout


def test_openrlhfs_flag_sets_the_size_of_sequence_groups() -> None:
    ranks = {"actor.num_gpus_per_node": 4}
    for verb in (rl, sft):
        assert verb(**{"ds.ring_attn_size": 2, **ranks}).ds.sequence_parallel_size == 2
        assert verb(**{"ds.ring_attn_size": 2, "ds.sequence_parallel_size": 2, **ranks}).ds.sequence_parallel_size == 2
        with pytest.raises(
            ValidationError, match=r"ds\.ring_attn_size 2 means ds\.sequence_parallel_size 2, but it is 4"
        ):
            verb(**{"ds.ring_attn_size": 2, "ds.sequence_parallel_size": 4, **ranks})


def test_a_packing_layout_may_be_given_with_openrlhfs_flag() -> None:
    assert rl(**{"ds.packing_samples": True, "train.layout": "packed"}).train.layout == "packed"


def test_evaluation_has_no_settings_of_training() -> None:
    with pytest.raises(ValidationError, match=r"actor\.adam\.lr would not be read: vlmrl eval does not have it"):
        EvalConfig.model_validate(nest({"actor.model_name_or_path": "m", "eval.dataset": "d", "actor.adam.lr": 1e-3}))


@pytest.mark.parametrize(
    ("verb", "values"),
    [
        (EvalConfig, {"eval.dataset": "d", "vllm.readback_steps": 5}),
        (RolloutBench, {"data.prompt_dataset": "d", "vllm.readback_steps": 5}),
        (SyncBench, {"vllm.generate_timeout_s": 5.0}),
        (SyncBench, {"ds.lora.rank": 8, "ds.lora.dropout": 0.1}),
    ],
)
def test_a_verb_has_only_the_settings_that_it_reads(verb: type[VerbConfig], values: dict[str, Any]) -> None:
    unread = list(values)[-1]
    with pytest.raises(ValidationError, match=rf"{unread} would not be read: vlmrl {verb.verb} does not have it"):
        verb.model_validate(nest({"actor.model_name_or_path": "m"} | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bench.steps": 4}, r"bench\.steps 4 is no multiple of 3: with bench\.queue_sizes 2 "),
        (
            {"bench.workload": "long_tail", "bench.step_s": 1.0},
            r"bench\.step_s would not be read: bench\.workload ",
        ),
        ({"bench.workload": "equal_lengths", "agent.num_workers": 2}, r"agent\.num_workers would not be read: "),
        ({"rollout.temperature": 0.5}, r"vlmrl bench async does not have it"),
    ],
)
def test_the_modes_of_a_run_are_measured_over_whole_periods(values: dict[str, Any], message: str) -> None:
    AsyncBench.model_validate(nest({"actor.model_name_or_path": "m"}))
    with pytest.raises(ValidationError, match=message):
        AsyncBench.model_validate(nest({"actor.model_name_or_path": "m"} | values))


def test_an_engine_step_has_a_token_for_each_response() -> None:
    with pytest.raises(ValidationError, match=r"vllm\.max_num_batched_tokens 64 is below vllm\.max_num_seqs 128"):
        Vllm(max_num_seqs=128, max_num_batched_tokens=64)


@pytest.mark.parametrize("make", [rl, sft])
def test_adapters_have_their_own_default_learning_rate(
    make: Callable[..., RlConfig | SftConfig],
) -> None:
    lora = {"ds.lora.rank": 8}
    assert make().actor.adam.lr == 1e-6
    assert make(**lora).actor.adam.lr == 1e-5
    assert make(**lora, **{"actor.adam.lr": 1e-6}).actor.adam.lr == 1e-6
    adam = make(**lora, **{"actor.adam.eps": 1e-6}).actor.adam
    assert (adam.lr, adam.eps) == (1e-5, 1e-6)
