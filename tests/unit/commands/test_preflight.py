"""The checks of settings, models and hardware before a run starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from vlmrl.cluster.placement import Place, plan
from vlmrl.cluster.roles import plan_arguments
from vlmrl.cluster.session import Node, Session
from vlmrl.commands.forecast import format_groups
from vlmrl.commands.hardware import check_hardware
from vlmrl.commands.preflight import (
    actor_adapter_plan,
    check_algorithm,
    check_models,
    check_sequence,
    critic_adapter_plan,
    format_checkpoint_plan,
)
from vlmrl.config.load import load
from vlmrl.config.stages import DpoConfig, SftConfig
from vlmrl.config.verbs import EvalConfig, RlConfig
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.plugins import processor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "micro", size="micro"))


def test_the_plan_says_how_often_checkpoints_are_written() -> None:
    words = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--ckpt.output_dir", "out"]
    for kind in (RlConfig, SftConfig):
        (line,) = format_checkpoint_plan(load(kind, words))
        assert line.startswith("checkpoints: none, ")
        (line,) = format_checkpoint_plan(load(kind, [*words, "--ckpt.save_steps", "20", "--ckpt.max_num", "2"]))
        assert line == "checkpoints: every 20 steps to out/checkpoints, the newest 2 are kept"
    words = ["--actor.model_name_or_path", "m", "--eval.dataset", "d"]
    assert format_checkpoint_plan(load(EvalConfig, words)) == [], "nothing is learnt"


def roles(**changes: Any) -> list[str]:
    config = {
        "actor": {"model_name_or_path": "model"},
        "data": {"prompt_dataset": "toy"},
        "algo": {"kl": {"init_coef": 0.1}},
    }
    machines = Session((Node(id="", num_cpus=8, num_gpus=0),))
    return [role.name for role in plan_arguments(RlConfig.model_validate(config | changes), machines)["roles"]]


def test_adapters_need_no_reference_model() -> None:
    lora = {"lora": {"rank": 8}}
    assert roles() == ["actor", "ref", "vllm"]
    assert roles(ds=lora) == ["actor", "vllm"]
    assert roles(ds=lora, ref={"model_name_or_path": "another"}) == ["actor", "ref", "vllm"]
    teacher = {"kl": {"init_coef": 0.1}, "distill": {"teacher_model_name_or_path": "t"}}
    assert roles(algo=teacher) == ["actor", "ref", "teacher", "vllm"]
    assert roles(algo=teacher, ds=lora) == ["actor", "teacher", "vllm"]


def test_the_engines_own_base_is_refused_where_merged_weights_replace_it(model: str) -> None:
    def planned(base: str) -> AdapterPlan | None:
        ds = {"load_in_4bit": True, "lora": {"rank": 8, "target_modules": ("all",)}}
        settings = {"actor": {"model_name_or_path": model}, "data": {"prompt_dataset": "toy"}, "ds": ds}
        config = RlConfig.model_validate(settings | {"vllm": {"qlora_base": base}})
        return actor_adapter_plan(config, processor(model, min_pixels=3136, max_pixels=12544))

    adapter = planned("dequantized")
    assert adapter is not None
    assert adapter.groups == {"language", "vision", "projector"}
    with pytest.raises(ConfigError, match=r"vllm\.qlora_base original is not possible with merged weights"):
        planned("original")


def placed(line: str) -> dict[str, tuple[int, set[int]]]:
    """Each role's number of workers, and the slots of the 16 that it has."""
    words = "--actor.model_name_or_path m --data.prompt_dataset d --vllm.num_engines 2 " + line
    machines = Session((Node(id="", num_cpus=16, num_gpus=0),))
    places = plan(**plan_arguments(load(RlConfig, words.split()), machines))
    return {name: (len(workers), {slot for w in workers for slot in w.slots}) for name, workers in places.items()}


def test_critic_and_reward_models_have_devices_of_their_own() -> None:
    placement = placed(
        "--algo.advantage.estimator gae --actor.num_gpus_per_node 2 --critic.num_gpus_per_node 2 "
        "--reward.model_name_or_path r --reward.process_model_name_or_path p --reward.num_gpus_per_node 2"
    )
    # The reward models share theirs with each other.
    assert placement == {
        "actor": (2, {0, 1}),
        "critic": (2, {2, 3}),
        "reward_model": (2, {4, 5}),
        "process_model": (2, {4, 5}),
        "vllm": (2, {6, 7}),
    }


def test_a_critic_in_the_actors_processes_is_not_a_role() -> None:
    placement = placed("--algo.advantage.estimator gae --actor.num_gpus_per_node 2 --train.colocate_actor_critic")
    assert placement == {"actor": (2, {0, 1}), "vllm": (2, {2, 3})}
    together = placed("--algo.advantage.estimator gae --train.colocate_all --reward.model_name_or_path r")
    assert together == {"actor": (1, {0}), "reward_model": (1, {0}), "vllm": (2, {0, 1})}


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("", ", or share devices with --train.colocate_all"),
        ("--train.async_enable", ", or share devices with --train.colocate_actor_critic or --train.colocate_actor_ref"),
        ("--train.async_enable --train.colocate_actor_critic --train.colocate_actor_ref", ""),
        ("--train.async_enable --train.async_queue_size 0", ", or share devices with --train.colocate_all"),
    ],
)
def test_the_advice_of_a_run_without_room_is_possible(line: str, advice: str) -> None:
    with pytest.raises(ClusterError, match=rf"lower --[a-z_.]+{advice}$"):
        placed(
            "--algo.advantage.estimator gae --algo.kl.init_coef 0.1 --algo.advantage.is_correction_enable "
            f"--actor.num_gpus_per_node 15 {line}"
        )


def test_critic_and_reward_model_may_share_devices() -> None:
    placement = placed(
        "--algo.advantage.estimator gae --critic.num_gpus_per_node 2 --reward.num_gpus_per_node 2 "
        "--reward.model_name_or_path r --train.colocate_critic_reward"
    )
    assert placement["critic"] == placement["reward_model"] == (2, {1, 2})
    with_actor = placed(
        "--algo.advantage.estimator gae --train.colocate_actor_critic --reward.model_name_or_path r "
        "--train.colocate_critic_reward"
    )
    assert with_actor["actor"] == with_actor["reward_model"] == (1, {0})


def test_a_reward_model_that_does_not_fit_is_named_with_its_flag() -> None:
    with pytest.raises(ClusterError, match=r"reward_model requires 99 .* lower --reward\.num_gpus_per_node"):
        placed("--reward.model_name_or_path r --reward.num_gpus_per_node 99")


ESTIMATOR = "--algo.advantage.estimator"


LOSS = "--actor.policy_loss_type"


@pytest.mark.parametrize(
    ("flag", "function", "message"),
    [
        (ESTIMATOR, "baseline", None),
        (LOSS, "loss", None),
        (
            ESTIMATOR,
            "missing",
            r"algo\.advantage\.estimator: .*mine\.py has no function missing; it has: baseline, loss",
        ),
        (ESTIMATOR, "loss", r"algo\.advantage\.estimator: loss requires logprobs, advantages"),
        (LOSS, "baseline", r"actor\.policy_loss_type: baseline requires rewards"),
    ],
)
def test_a_users_own_algorithm_is_checked_before_anything_starts(
    flag: str, function: str, message: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def baseline(rewards):\n    return rewards\n\ndef loss(logprobs, advantages):\n    return -logprobs\n"
    )
    words = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", flag, f"{file}:{function}"]
    config = load(RlConfig, words)
    if message is None:
        check_algorithm(config)
    else:
        with pytest.raises(ConfigError, match=message):
            check_algorithm(config)


@pytest.mark.parametrize(
    "flag", ["critic.model_name_or_path", "reward.model_name_or_path", "reward.process_model_name_or_path"]
)
def test_a_missing_model_is_named_with_its_flag(flag: str) -> None:
    words = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", ESTIMATOR, "gae", f"--{flag}", "/no/such"]
    with pytest.raises(ConfigError, match=rf"^{flag}: .*/no/such"):
        check_models(load(RlConfig, words))


@pytest.mark.parametrize("flag", ["critic.model_name_or_path", "ref.model_name_or_path"])
def test_a_model_that_reads_other_tokens_than_the_actor_is_refused(flag: str, model: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    words = ["--actor.model_name_or_path", model, "--data.prompt_dataset", "d", f"--{flag}", str(other)]
    words += [ESTIMATOR, "gae", "--algo.kl.init_coef", "0.1"]
    check_models(load(RlConfig, words))
    reader = processor(model, min_pixels=3136, max_pixels=100_000)
    reader.tokenizer.add_tokens(["more"])
    reader.save(other)
    with pytest.raises(ConfigError, match=rf"^{flag}: .*/other reads other tokens than {model}") as caught:
        check_models(load(RlConfig, words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--actor.optim", "adam_paged"], r"^actor\.optim adam_paged .* needs CUDA"),
        ([ESTIMATOR, "gae", "--critic.optim", "adam_8bit"], r"^critic\.optim adam_8bit .* needs CUDA"),
        (["--vllm.enable_sleep", "--train.colocate_all"], r"^vllm\.enable_sleep frees GPU memory"),
        (["--ds.enable_sleep", "--train.colocate_all"], r"^ds\.enable_sleep frees GPU memory"),
    ],
)
def test_settings_that_need_a_gpu_are_refused_without_one(model: str, more: list[str], message: str) -> None:
    config = load(RlConfig, ["--actor.model_name_or_path", model, "--data.prompt_dataset", "d", *more])
    check_hardware(config, Session((Node(id="", num_cpus=2, num_gpus=8),)))
    with pytest.raises(ConfigError, match=message):
        check_hardware(config, Session((Node(id="", num_cpus=2, num_gpus=0),)))


@pytest.mark.parametrize("num_gpus", [0, 8])
def test_engines_serve_hybrid_models_in_bf16_only(tmp_path: Path, num_gpus: int) -> None:
    hybrid = tiny.build("qwen3_5", tmp_path / "micro", size="micro")
    machine = Session((Node(id="", num_cpus=8, num_gpus=num_gpus),))

    def check(kind: type[RlConfig | SftConfig | EvalConfig], data: str, *more: str) -> None:
        check_hardware(load(kind, ["--actor.model_name_or_path", str(hybrid), data, "d", *more]), machine)

    for kind, data in ((RlConfig, "--data.prompt_dataset"), (EvalConfig, "--eval.dataset")):
        check(kind, data, "--ds.param_dtype", "bf16")
        with pytest.raises(ConfigError, match=r"^ds\.param_dtype fp32 .*\(qwen3_5_text\) in bf16 only: set"):
            check(kind, data, "--ds.param_dtype", "fp32")
    # Nothing is sampled.
    check(SftConfig, "--data.prompt_dataset", "--ds.param_dtype", "fp32")


def test_ranks_that_cannot_share_a_models_layers_are_refused_before_anything_starts(model: str, tmp_path: Path) -> None:
    hybrid = str(tiny.build("qwen3_5_text", tmp_path / "micro", size="micro"))

    def check(kind: type[RlConfig | SftConfig], actor: str, size: int, *more: str) -> None:
        words = ["--actor.model_name_or_path", actor, "--data.prompt_dataset", "d", "--actor.num_gpus_per_node", "6"]
        check_sequence(load(kind, [*words, "--ds.sequence_parallel_size", str(size), *more]))

    for kind in (RlConfig, SftConfig):
        check(kind, hybrid, 1)
        check(kind, model, 2)
        with pytest.raises(ConfigError, match=r"^ds\.sequence_parallel_size 3 does not divide the 2 attention heads"):
            check(kind, model, 3)
        with pytest.raises(ConfigError, match=r"^ds\.sequence_parallel_size 2: Qwen3_5ForCausalLM has recurrent"):
            check(kind, hybrid, 2)
    critic = [ESTIMATOR, "gae", "--critic.num_gpus_per_node", "6", "--critic.model_name_or_path", hybrid]
    with pytest.raises(ConfigError, match="Qwen3_5ForCausalLM has recurrent layers"):
        check(RlConfig, model, 2, *critic)


def test_groups_of_ranks_across_machines_are_named(model: str) -> None:
    def lines(kind: type[RlConfig | SftConfig], *more: str) -> list[str]:
        words = ["--actor.model_name_or_path", model, "--data.prompt_dataset", "d", "--ds.sequence_parallel_size", "2"]
        return format_groups(load(kind, [*words, *more]))

    for kind in (RlConfig, SftConfig):
        three = ["--actor.num_gpus_per_node", "3"]
        (line,) = lines(kind, "--actor.num_nodes", "2", *three)
        assert line.startswith(
            "warning: actor.num_gpus_per_node 3 is no multiple of ds.sequence_parallel_size 2: ranks"
        )
        assert not lines(kind, "--actor.num_nodes", "2", "--actor.num_gpus_per_node", "4")
        assert not lines(kind, "--actor.num_gpus_per_node", "2")
    critic = [ESTIMATOR, "gae", "--critic.num_nodes", "2", "--critic.num_gpus_per_node", "1"]
    (line,) = lines(RlConfig, "--actor.num_gpus_per_node", "2", *critic)
    assert "critic.num_gpus_per_node 1 is no multiple" in line


def test_adapters_in_fp32_are_refused_where_an_engine_would_apply_them_on_a_gpu(model: str) -> None:
    def check(*more: str, num_gpus: int = 8) -> None:
        words = ["--actor.model_name_or_path", model, "--data.prompt_dataset", "d", "--ds.lora.rank", "8", *more]
        config = load(RlConfig, words)
        adapter = actor_adapter_plan(config, processor(model, min_pixels=3136, max_pixels=12544))
        check_hardware(config, Session((Node(id="", num_cpus=8, num_gpus=num_gpus),)), adapter)

    with pytest.raises(ConfigError, match=r"ds\.param_dtype fp32 with ds\.lora.*set ds\.param_dtype bf16") as caught:
        check("--ds.param_dtype", "fp32")
    assert "\n" not in str(caught.value)
    check("--ds.param_dtype", "bf16")
    check("--ds.param_dtype", "fp32", num_gpus=0)
    # Merged weights travel instead of these, and the engine has no adapter.
    check("--ds.param_dtype", "fp32", "--ds.lora.target_modules", "all")


def test_the_critic_has_an_adapter_of_its_own(model: str) -> None:
    def planned(line: str) -> AdapterPlan | None:
        words = f"--actor.model_name_or_path {model} --data.prompt_dataset d {line}"
        return critic_adapter_plan(load(RlConfig, words.split()))

    gae, lora = f"{ESTIMATOR} gae", "--ds.lora.rank 4"
    assert planned(lora) is None
    assert planned(gae) is None
    everywhere = planned(f"{gae} {lora} --ds.lora.target_modules all")
    frozen = planned(
        f"{gae} {lora} --ds.lora.target_modules all --critic.freeze_visual_encoder --critic.freeze_projector"
    )
    assert everywhere is not None
    assert frozen is not None
    assert everywhere.groups == {"language", "vision", "projector"}
    assert frozen.groups == {"language"}


@pytest.mark.parametrize("verb", [SftConfig, DpoConfig])
@pytest.mark.parametrize(("words", "placed"), [("", ["actor"]), ("--eval.generate_enable true", ["actor", "vllm"])])
def test_supervised_training_places_engines_only_where_it_samples(
    verb: type[SftConfig | DpoConfig], words: str, placed: list[str]
) -> None:
    needed = "--actor.model_name_or_path m --data.prompt_dataset d --eval.dataset e"
    precomputed = "--dpo.precompute_reference true" if verb is DpoConfig else ""
    config = load(verb, f"{needed} {precomputed} {words}".split())
    machines = Session((Node(id="", num_cpus=8, num_gpus=0),))
    assert [role.name for role in plan_arguments(config, machines)["roles"]] == placed


def test_engines_of_supervised_training_may_share_its_devices() -> None:
    needed = "--actor.model_name_or_path m --data.prompt_dataset d --eval.dataset e --eval.generate_enable true"
    machines = Session((Node(id="", num_cpus=1, num_gpus=0),))
    with pytest.raises(ClusterError, match=r"vllm requires 1 CPU core .*, or share devices with --train.colocate_all$"):
        plan(**plan_arguments(load(SftConfig, needed.split()), machines))
    places = plan(**plan_arguments(load(SftConfig, [*needed.split(), "--train.colocate_all"]), machines))
    assert places["actor"] == places["vllm"]


def test_sharing_devices_is_not_advised_where_no_setting_shares_them() -> None:
    needed = "--actor.model_name_or_path m --data.prompt_dataset d"
    machines = Session((Node(id="", num_cpus=1, num_gpus=0),))
    with pytest.raises(ClusterError, match=r"ref requires 1 CPU core .*: lower --ref.num_gpus_per_node$"):
        plan(**plan_arguments(load(DpoConfig, needed.split()), machines))


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("", {"vllm": [Place(0, (0,))]}),
        ("--reward.model_name_or_path j", {"reward_model": [Place(0, (0,))], "vllm": [Place(0, (1,))]}),
        (
            "--reward.model_name_or_path j --reward.process_model_name_or_path k --train.colocate_all",
            {"reward_model": [Place(0, (0,))], "process_model": [Place(0, (0,))], "vllm": [Place(0, (0,))]},
        ),
    ],
)
def test_an_evaluation_places_its_reward_models(words: str, places: dict[str, list[Place]]) -> None:
    config = load(EvalConfig, f"--actor.model_name_or_path m --eval.dataset e {words}".split())
    machines = Session((Node(id="", num_cpus=2, num_gpus=2),))
    assert plan(**plan_arguments(config, machines)) == places
