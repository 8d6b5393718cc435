"""`vlmrl plan`, from its words to the settings that `vlmrl rl` accepts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from vlmrl.commands.plan import make_planner, plan, read_run
from vlmrl.config.load import load
from vlmrl.config.names import setting_value
from vlmrl.config.plan import PlanConfig, full_names
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models import tiny
from vlmrl.plan.measured import step_seconds
from vlmrl.plan.planner import sequence_sizes

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
APART = "--train.colocate_all false"


def given(*words: str) -> PlanConfig:
    return load(PlanConfig, full_names(words))


def test_short_flags() -> None:
    config = given("--model", "Qwen3-8B", "--gpus=16", "--gpu", "A100-80", "--response_tokens", "300")
    assert config.actor.model_name_or_path == "Qwen3-8B"
    assert (config.plan.gpus, config.plan.gpu, config.plan.response_tokens) == (16, "A100-80", 300)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "12"), "plan.gpus 12 is no multiple of plan.gpus_per_node 8"),
        (("--gpu", "cpu"), "plan.gpu cpu is this machine as a whole"),
        (("--response_tokens", "4000"), "plan.response_tokens 4000 is above rollout.max_new_tokens 1024"),
        (("--prompt_tokens", "4000"), "plan.prompt_tokens 4000 is above data.max_len 2048"),
    ],
)
def test_contradictions(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given("--model", "Qwen3-8B", *words)


def test_the_plan_is_settings_that_rl_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "plan.yaml", tmp_path / "plan.png"
    words = ("--gpus", "8", "--output", str(out), "--picture", str(picture), "--algo.kl.init_coef", "0.001")
    plan(given("--model", "Qwen2.5-VL-7B", *words))
    shown = capsys.readouterr().out
    assert "all figures are estimates" in shown
    assert "what binds:" in shown
    config = load(RlConfig, ["--config", str(out)])
    assert config.actor.model_name_or_path == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert config.algo.kl.init_coef == 0.001
    assert config.data.prompt_dataset == "geometry3k"
    ranks = config.actor.num_nodes * config.actor.num_gpus_per_node
    engines = config.vllm.num_engines * config.vllm.tensor_parallel_size
    assert ranks == engines == 8 if config.train.colocate_all else ranks + engines == 8
    assert "Estimate, not measured" in out.read_text()
    assert picture.stat().st_size > 5_000


@pytest.mark.parametrize(
    "words",
    [
        f"{APART} --algo.kl.init_coef 0.001 --ref.num_gpus_per_node 2 --train.colocate_actor_ref false",
        f"{APART} --algo.advantage.estimator gae --critic.num_gpus_per_node 2 --train.colocate_actor_critic false",
        "--algo.advantage.is_correction_enable false",
        "--ds.zero_stage 1 --vllm.sync_backend shm",
        "--vllm.pipeline_parallel_size 2",
    ],
)
def test_what_is_given_stays(words: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    plan(given("--model", "Qwen3-0.6B", "--output", str(out), *words.split()))
    chosen, asked = load(RlConfig, ["--config", str(out)]), given("--model", "Qwen3-0.6B", *words.split())
    for name, value in asked.given().items():
        if name != "actor.model_name_or_path":
            assert setting_value(chosen, name) == value, name


def test_main_memory_is_that_of_each_machine(tmp_path: Path) -> None:
    """Optimizer states in main memory on one of two machines: 1.4 TB, of 1 TB each."""
    planner = make_planner(given("--model", "Qwen2.5-VL-72B", "--gpus", "16"), tmp_path)
    settings = {
        "actor.gradient_checkpointing_enable": True,
        "ds.zero_stage": 3,
        "ds.adam_offload": True,
        "train.colocate_all": False,
        "train.max_tokens_per_gpu": 8192,
        "vllm.tensor_parallel_size": 4,
    }
    one = settings | {"actor.num_nodes": 1, "actor.num_gpus_per_node": 8, "vllm.num_engines": 2}
    both = settings | {"actor.num_nodes": 2, "actor.num_gpus_per_node": 4, "vllm.num_engines": 2}
    assert not planner.agrees(one)
    assert planner.agrees(both)
    assert replace(planner, machine=replace(planner.machine, host_bytes=2 * 2048 * 2**30)).agrees(one)


def test_what_a_run_refuses_is_not_planned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ds\.load_in_4bit: bitsandbytes has 4 bits for linear layers only"):
        plan(given("--model", "Qwen3-30B-A3B", "--ds.lora.rank", "32", "--ds.load_in_4bit", "true"))
    hybrid, dense = (tiny.build(family, tmp_path / family, size="micro") for family in ("qwen3_5", "qwen3"))
    sizes = [sequence_sizes(make_planner(given("--model", str(path)), tmp_path).config) for path in (hybrid, dense)]
    assert sizes == [[1], [1, 2]]
    with pytest.raises(ConfigError, match=r"data\.max_len \d+ is below the \d+ tokens of images"):
        plan(given("--model", "Qwen2.5-VL-7B", "--data.max_len", "100"))


def test_zero_bytes_and_published_bytes_of_a_large_run(tmp_path: Path) -> None:
    planner = make_planner(given("--model", "Qwen2.5-VL-72B", "--gpus", "64"), tmp_path)
    parameters = 73_410_777_344
    assert planner.costs.parameters == pytest.approx(parameters, rel=1e-4)
    settings = {
        "actor.num_nodes": 8,
        "actor.num_gpus_per_node": 8,
        "actor.gradient_checkpointing_enable": True,
        "ds.zero_stage": 3,
        "vllm.num_engines": 8,
        "vllm.tensor_parallel_size": 8,
        "vllm.sync_backend": "ipc",
        "train.colocate_all": True,
        "vllm.enable_sleep": True,
    }
    actor = next(role for role, _ in planner.memory(settings).roles if role.name == "actor")
    parts = {part.name: part.num_bytes for part in actor.parts}
    assert parts["optimizer"] == pytest.approx(12 * parameters / 64, rel=1e-3)
    sync = next(phase for phase in planner.step(settings).phases if phase.name == "sync")
    (part,) = sync.parts
    assert part.work["link"] == pytest.approx(2 * parameters * 63 / 64, rel=1e-3)
    assert part.work["bytes"] == pytest.approx(2 * 2 * parameters / 8, rel=1e-3)


def test_a_run_that_fits_nowhere_says_what_would() -> None:
    words = ("--model", "Qwen3-8B", "--gpus", "1", "--gpu", "A100-40", "--gpus_per_node", "4")
    with pytest.raises(ClusterError, match=r"what would fit: .*QLoRA.*8 of these GPUs"):
        plan(given(*words, "--ds.adam_offload", "false"))


def test_a_configuration_alone_is_a_model(tmp_path: Path) -> None:
    folder = tiny.build("qwen3", tmp_path / "tiny", size="micro")
    file = tmp_path / "alone" / "config.json"
    file.parent.mkdir()
    file.write_text((folder / "config.json").read_text())
    planners = [make_planner(given("--model", str(path)), tmp_path / "s") for path in (folder, file, file.parent)]
    assert len({planner.costs for planner in planners}) == 1
    out = tmp_path / "plan.yaml"
    plan(given("--model", str(file), "--output", str(out)))
    assert load(RlConfig, ["--config", str(out)]).actor.model_name_or_path == str(file.parent)
    assert "needs weights and a tokenizer" in out.read_text()


def test_experts_are_counted_by_any_of_their_names(tmp_path: Path) -> None:
    folder = tiny.build("qwen3_moe", tmp_path / "moe", size="micro")
    config = json.loads((folder / "config.json").read_text())
    text = AutoConfig.for_model("mixtral", **SMALL)
    text.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(
            json.loads((folder / "config.json").read_text())
            | {"vocab_size": config["vocab_size"], "architectures": ["MixtralForCausalLM"]}
        )
    )
    experts = make_planner(given("--model", str(folder)), tmp_path / "s").costs.experts
    assert experts is not None
    assert (experts.count, experts.per_token) == (8, 2)
    assert experts.parameters == 2 * 8 * 3 * 32 * 48


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="is no configuration of a model"):
        make_planner(given("--model", str(file)), tmp_path)
    file.write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ConfigError, match="has the model type bert"):
        make_planner(given("--model", str(file)), tmp_path)


def test_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model Qwen9-8B is known here \(the nearest is Qwen3-8B\)"):
        make_planner(given("--model", "Qwen9-8B"), tmp_path)


def test_an_unknown_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no GPU V100; there are A100-40"):
        make_planner(given("--model", "Qwen3-8B", "--gpu", "V100"), tmp_path)


def test_seconds_of_a_run_are_those_after_the_first_step(tmp_path: Path) -> None:
    records = [
        {"step": step, "time/step_s": total, "time/rollout_s": rollout, "time/update_s": 1.0}
        for step, total, rollout in ((1, 9.0, 8.0), (2, 4.0, 2.0), (3, 5.0, 3.0), (4, 6.0, 3.5))
    ]
    assert step_seconds(records) == {"rollout": 3.0, "update": 1.0, "other": 1.0, "step": 5.0}
    assert step_seconds(records, min) == {"rollout": 2.0, "update": 1.0, "other": 1.0, "step": 4.0}
    with pytest.raises(ConfigError, match="at least two steps"):
        step_seconds(records[:1])
    with pytest.raises(ConfigError, match="no output folder of a run"):
        read_run(tmp_path, None, image_pixels=0)  # type: ignore[arg-type]
