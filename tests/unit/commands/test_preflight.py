"""Dry runs and the checks before a run starts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from vlmrl import cli
from vlmrl.cluster.placement import plan
from vlmrl.cluster.roles import roles_of
from vlmrl.cluster.session import Node, Session
from vlmrl.commands.preflight import (
    actor_adapter_plan,
    check_algorithm,
    check_hardware,
    check_models,
    critic_adapter_plan,
    format_checkpoint_plan,
)
from vlmrl.config.load import load
from vlmrl.config.run import EvalConfig, RlConfig, SftConfig
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.plugins import processor

COUNTING = "visual_math?families=count&difficulty=1&pixels=56&size=32"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model") / "micro", size="micro"))


def dry_run(verb: str, model: str, out: Path, *flags: str) -> int:
    common = ["--actor.model_name_or_path", model, "--ckpt.output_dir", str(out), "--dry-run"]
    data = ["--data.prompt_dataset", COUNTING, "--train.batch_size", "16"]
    sampling = ["--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4"] if verb == "rl" else []
    return cli.main([verb, *common, *data, *sampling, *flags])


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("rl", model, tmp_path / "out", "--train.colocate_all", "--eval.dataset", COUNTING) == 0
    shown = capsys.readouterr().out
    assert "placement" in shown
    assert "evaluation: visual_math" in shown
    assert "How many circles?" in shown
    assert "checkpoints: none, so a stopped run starts again at step 1" in shown
    assert not (tmp_path / "out").exists()


def test_the_plan_says_how_often_checkpoints_are_written() -> None:
    words = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--ckpt.output_dir", "out"]
    for kind in (RlConfig, SftConfig):
        (line,) = format_checkpoint_plan(load(kind, words))
        assert line.startswith("checkpoints: none, ")
        (line,) = format_checkpoint_plan(load(kind, [*words, "--ckpt.save_steps", "20", "--ckpt.max_num", "2"]))
        assert line == "checkpoints: every 20 steps to out/checkpoints, the newest 2 are kept"
    words = ["--actor.model_name_or_path", "m", "--eval.dataset", "d"]
    assert format_checkpoint_plan(load(EvalConfig, words)) == [], "nothing is learnt"


def test_a_dry_run_names_labels_that_no_response_can_match(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    labels = ["4", "145°", "\\\\frac{1}{", "x^2 +", "", "\\\\sqrt{", "\\\\frac{1}{2}"]
    file.write_text("".join(f'{{"input": "q", "label": "{label}"}}\n' for label in labels))
    data = ["--data.prompt_dataset", str(file), "--data.max_dropped_fraction", "1.0"]
    assert dry_run("rl", model, tmp_path / "out", *data) == 0
    shown = capsys.readouterr().out
    said = next(line for line in shown.splitlines() if line.startswith("labels: "))
    assert "4 of the first 7 rows cannot be used by reward.functions" in said
    assert said.count("(it ") == 3
    assert "dropped, label unusable: '': it is empty" in shown
    assert dry_run("rl", model, tmp_path / "out", *data, "--reward.functions", "{format: 1.0}") == 0
    assert "can be used" in capsys.readouterr().out


@pytest.mark.parametrize("way", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("verb", "flag", "rows", "said"),
    [
        (
            "rl",
            "data.prompt_dataset",
            [{"input": "q", "gold": "4"}],
            "no column 'label' (data.label_key), which reward.",
        ),
        ("rl", "eval.dataset", [{"input": "q", "answer": "4"}], "did you mean --data.label_key answer?"),
        ("eval", "eval.dataset", [{"input": "q"}], "which reward.functions math needs"),
        ("sft", "data.prompt_dataset", [{"input": "q"}], "nothing says what to learn"),
        ("rl", "data.prompt_dataset", [{"input": "<image>?", "label": 1, "image_path": "a.png"}], "to image_path, or"),
    ],
)
def test_missing_columns_are_reported_before_anything_starts(
    way: list[str], verb: str, flag: str, rows: Any, said: str, model: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--actor.model_name_or_path", model, "--ckpt.output_dir", str(tmp_path / "out"), *way]
    words += [] if verb == "eval" or flag == "data.prompt_dataset" else ["--data.prompt_dataset", COUNTING]
    assert cli.main([verb, *words, f"--{flag}", str(tmp_path / "rows.jsonl")]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_label_that_a_users_function_requires_is_checked(model: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "q", "gold": "4"}')
    (tmp_path / "mine.py").write_text("def score(response, label):\n    return 1.0\n")
    words = ["--data.prompt_dataset", str(tmp_path / "rows.jsonl"), "--reward.remote_url", f"{tmp_path}/mine.py:score"]
    assert dry_run("rl", model, tmp_path / "out", *words) == 2
    assert "no column 'label' (data.label_key), which reward.remote_url" in capsys.readouterr().err


def test_columns_that_a_users_function_requires_are_checked_in_every_dataset(
    model: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "q", "label": "4", "level": 1}\n' * 8)
    (tmp_path / "test.jsonl").write_text('{"input": "q", "label": "4"}\n')
    (tmp_path / "mine.py").write_text("def score(prompts, completions, answer, level, seldom=0):\n    return [1.0]\n")
    words = ["--data.prompt_dataset", str(tmp_path / "rows.jsonl"), "--reward.remote_url", f"{tmp_path}/mine.py:score"]
    words += ["--train.max_steps", "1"]
    assert dry_run("rl", model, tmp_path / "out", *words) == 0, capsys.readouterr().err
    assert dry_run("rl", model, tmp_path / "out", *words, "--eval.dataset", str(tmp_path / "test.jsonl")) == 2
    said = "dataset test has no column 'level', for which reward.remote_url asks; it has: input, label"
    assert said in capsys.readouterr().err


def test_a_dry_run_counts_evaluation_rows_without_a_label(model: str, tmp_path: Path, capsys: Any) -> None:
    rows = [{"input": "q", "label": "4"}, {"input": "q", "label": None}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert dry_run("rl", model, tmp_path / "out", "--eval.dataset", str(tmp_path / "rows.jsonl")) == 2
    assert "1 of the first 2 rows cannot be used (1 no label; the last: rows:1" in capsys.readouterr().err


def test_a_dry_run_shows_what_is_held_out(model: str, tmp_path: Path, capsys: Any) -> None:
    assert dry_run("rl", model, tmp_path / "out", "--data.eval_fraction", "0.25") == 0
    table = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("│training│24│") for line in table)
    assert any(line.startswith("│evaluation:visual_math│8│") for line in table)


def test_evaluation_sets_need_not_have_the_columns_of_the_training_rows(
    model: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"input": "q{n}", "gold": "{n}"}}\n' for n in range(40)))
    words = ["--data.prompt_dataset", f"{tmp_path}/rows.jsonl,arithmetic?size=20", "--data.label_key", "gold"]
    words += ["--data.eval_fraction", "0.2", "--eval.dataset", "visual_math?families=count&difficulty=1&size=4"]
    assert dry_run("rl", model, tmp_path / "out", *words) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out.replace(" ", "")
    assert all(f"evaluation:{name}" in shown for name in ("rows", "arithmetic", "visual_math"))


def test_a_dry_run_of_supervised_training_checks_the_responses(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("sft", model, tmp_path / "out") == 0
    assert "dry run: nothing was started" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--vllm.num_engines", "999", "--train.colocate_all"], "vllm wants 999"),
        (["--actor.model_name_or_path", "/no/such/model"], "there is no folder /no/such/model"),
        (["--data.label_key", "solution"], "solution"),
        (["--reward.remote_url", "/no/such/file.py:score"], "/no/such/file.py"),
        (["--data.prompt_dataset", "visual_maths"], "visual_math"),
        (["--rollout.n_samples_per_prompt", "1", "--train.batch_size", "4"], "rollout.n_samples_per_prompt"),
        (["--ds.lora.rank", "8", "--ds.lora.target_modules", "q_prog"], "did you mean q_proj?"),
        (["--actor.optim", "adam_8bit"], "actor.optim adam_8bit"),
        (["--rollout.batch_size", "1280"], "do not fill one batch of 1280: lower --rollout.batch_size"),
        (
            ["--ds.lora.rank", "8", "--ds.lora.target_modules", "qkv", "--actor.freeze_visual_encoder"],
            "reaches into the frozen vision tower",
        ),
    ],
)
def test_settings_that_cannot_work_are_one_line_and_exit_code_2(
    flags: list[str], line: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("rl", model, tmp_path / "out", *flags) == 2
    shown = capsys.readouterr().err.strip()
    assert line in shown
    assert shown.count("\n") == 0
    assert "Traceback" not in shown


def test_a_dry_run_describes_the_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("rl", model, tmp_path / "out", "--train.colocate_all", "--actor.num_nodes", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    for start in (
        "a dry run sees only this machine: planned for 2 machines like it",
        "first prompt (visual_math:",
        "plan: 8 steps of 4 prompts x 4 responses = 16 samples, 1 update each of 16 samples; 1 pass over 32 rows",
        "trains: language model and vision tower and projector",
        "rows: of the first 32, none is dropped; the longest prompt has ",
        "rewards on visual_math:",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_a_dry_run_does_not_reject_a_cluster_by_this_machine(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert dry_run("rl", model, tmp_path / "out", "--vllm.num_engines", "999", "--train.colocate_all") == 0
    shown = capsys.readouterr().out
    assert "warning: placement: vllm wants 999" in shown
    assert "a dry run does not contact the cluster of RAY_ADDRESS" in shown


def test_a_dry_run_of_an_evaluation_shows_its_first_prompt_and_its_rewards(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--actor.model_name_or_path",
        model,
        "--eval.dataset",
        COUNTING,
        "--ckpt.output_dir",
        str(tmp_path / "out"),
    ]
    assert cli.main(["eval", "--dry-run", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("first prompt (visual_math:0)") for line in lines)
    assert any(line.startswith("rewards on visual_math:0: ") and "math 1, total 1" in line for line in lines)
    assert cli.main(["eval", "--dry-run", *flags, "--data.max_len", "8000"]) == 2
    assert "8192 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--rollout.batch_size", "64", "--train.batch_size", "64"], "32 rows, 1 times over, do not fill one batch"),
        (["--data.max_len", "8000"], "are 9024 tokens, and .* has 8192 positions: lower one of them"),
        (["--logger.wandb.project", "p"], "WANDB_API_KEY|wandb is not installed"),
        (["--logger.tensorboard_dir", "/dev/null/tb"], "/dev/null is not a folder.* set --logger.tensorboard_dir"),
    ],
)
def test_errors_that_would_end_a_run_later_end_the_dry_run(
    flags: list[str],
    line: str,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert dry_run("rl", model, tmp_path / "out", "--train.colocate_all", *flags) == 2
    assert re.search(line, capsys.readouterr().err)


def roles(**changes: Any) -> list[str]:
    config = {
        "actor": {"model_name_or_path": "model"},
        "data": {"prompt_dataset": "toy"},
        "algo": {"kl": {"init_coef": 0.1}},
    }
    machines = Session((Node(id="", num_cpus=8, num_gpus=0),))
    return [role.name for role in roles_of(RlConfig.model_validate(config | changes), machines)["roles"]]


def test_adapters_need_no_reference_model() -> None:
    lora = {"lora": {"rank": 8}}
    assert roles() == ["actor", "ref", "vllm"]
    assert roles(ds=lora) == ["actor", "vllm"]
    assert roles(ds=lora, ref={"model_name_or_path": "another"}) == ["actor", "ref", "vllm"]


def test_the_engines_own_base_is_refused_where_merged_weights_replace_it(model: str) -> None:
    def planned(base: str) -> AdapterPlan | None:
        ds = {"load_in_4bit": True, "lora": {"rank": 8, "target_modules": ("all",)}}
        settings = {"actor": {"model_name_or_path": model}, "data": {"prompt_dataset": "toy"}, "ds": ds}
        config = RlConfig.model_validate(settings | {"vllm": {"qlora_base": base}})
        return actor_adapter_plan(config, processor(model, min_pixels=3136, max_pixels=12544))

    found = planned("dequantized")
    assert found is not None
    assert found.groups == {"language", "vision", "projector"}
    with pytest.raises(ConfigError, match=r"vllm\.qlora_base original cannot be had with merged weights"):
        planned("original")


def test_a_folder_that_holds_another_run_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert dry_run("rl", model, tmp_path) == 2
    assert "holds another run" in capsys.readouterr().err


def placed(line: str) -> dict[str, tuple[int, set[int]]]:
    """Each role's number of workers, and the slots of the 16 that it has."""
    words = "--actor.model_name_or_path m --data.prompt_dataset d --vllm.num_engines 2 " + line
    machines = Session((Node(id="", num_cpus=16, num_gpus=0),))
    places = plan(**roles_of(load(RlConfig, words.split()), machines))
    return {name: (len(workers), {slot for w in workers for slot in w.slots}) for name, workers in places.items()}


def test_critic_and_reward_models_have_devices_of_their_own() -> None:
    found = placed(
        "--algo.advantage.estimator gae --actor.num_gpus_per_node 2 --critic.num_gpus_per_node 2 "
        "--reward.model_name_or_path r --reward.process_model_name_or_path p --reward.num_gpus_per_node 2"
    )
    # The reward models share theirs with each other.
    assert found == {
        "actor": (2, {0, 1}),
        "critic": (2, {2, 3}),
        "reward_model": (2, {4, 5}),
        "process_model": (2, {4, 5}),
        "vllm": (2, {6, 7}),
    }


def test_a_critic_in_the_actors_processes_is_not_a_role() -> None:
    found = placed("--algo.advantage.estimator gae --actor.num_gpus_per_node 2 --train.colocate_actor_critic")
    assert found == {"actor": (2, {0, 1}), "vllm": (2, {2, 3})}
    together = placed("--algo.advantage.estimator gae --train.colocate_all --reward.model_name_or_path r")
    assert together == {"actor": (1, {0}), "reward_model": (1, {0}), "vllm": (2, {0, 1})}


def test_critic_and_reward_model_may_share_devices() -> None:
    found = placed(
        "--algo.advantage.estimator gae --critic.num_gpus_per_node 2 --reward.num_gpus_per_node 2 "
        "--reward.model_name_or_path r --train.colocate_critic_reward"
    )
    assert found["critic"] == found["reward_model"] == (2, {1, 2})
    with_actor = placed(
        "--algo.advantage.estimator gae --train.colocate_actor_critic --reward.model_name_or_path r "
        "--train.colocate_critic_reward"
    )
    assert with_actor["actor"] == with_actor["reward_model"] == (1, {0})


def test_a_reward_model_that_does_not_fit_is_named_with_its_flag() -> None:
    with pytest.raises(ClusterError, match=r"reward_model wants 99 .* lower --reward\.num_gpus_per_node"):
        placed("--reward.model_name_or_path r --reward.num_gpus_per_node 99")


ESTIMATOR = "--algo.advantage.estimator"
LOSS = "--actor.policy_loss_type"


@pytest.mark.parametrize(
    ("flag", "function", "said"),
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
    flag: str, function: str, said: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def baseline(rewards):\n    return rewards\n\ndef loss(logprobs, advantages):\n    return -logprobs\n"
    )
    words = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", flag, f"{file}:{function}"]
    config = load(RlConfig, words)
    if said is None:
        check_algorithm(config)
    else:
        with pytest.raises(ConfigError, match=said):
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
    ("more", "said"),
    [
        (["--actor.optim", "adam_paged"], r"^actor\.optim adam_paged .* needs CUDA"),
        ([ESTIMATOR, "gae", "--critic.optim", "adam_8bit"], r"^critic\.optim adam_8bit .* needs CUDA"),
        (["--vllm.enable_sleep", "--train.colocate_all"], r"^vllm\.enable_sleep frees GPU memory"),
        (["--ds.enable_sleep", "--train.colocate_all"], r"^ds\.enable_sleep frees GPU memory"),
    ],
)
def test_settings_that_need_a_gpu_are_refused_without_one(more: list[str], said: str) -> None:
    config = load(RlConfig, ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", *more])
    check_hardware(config, Session((Node(id="", num_cpus=2, num_gpus=8),)))
    with pytest.raises(ConfigError, match=said):
        check_hardware(config, Session((Node(id="", num_cpus=2, num_gpus=0),)))


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


def test_a_best_model_by_another_metric_is_refused_before_anything_starts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("# vlmrl rl --config config.yaml\n")
    (tmp_path / "checkpoints/step_000002").mkdir(parents=True)
    (tmp_path / "best").mkdir()
    (tmp_path / "best/best.json").write_text('{"metric": "eval/visual_math/reward", "value": 1.0, "step": 2}')
    flags = ["--eval.dataset", COUNTING, "--eval.steps", "1", "--ckpt.best_metric_key", "eval/visual_math/pass@1"]
    assert dry_run("rl", model, tmp_path, *flags, "--ckpt.load_enable") == 2
    assert "was chosen by eval/visual_math/reward" in capsys.readouterr().err


@pytest.mark.parametrize("way", [[], ["--dry-run"]])
def test_models_are_checked_before_anything_starts(
    way: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--actor.model_name_or_path", model, "--data.prompt_dataset", COUNTING, "--ckpt.output_dir"]
    assert cli.main(["rl", *words, str(tmp_path / "out"), "--reward.model_name_or_path", "/no/such", *way]) == 2
    assert "reward.model_name_or_path: there is no folder /no/such" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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
