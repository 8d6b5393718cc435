"""A dry run finds what can be found before anything starts, and starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmrl import cli
from vlmrl.cluster.session import Node, Session
from vlmrl.config.run import RlConfig
from vlmrl.errors import ConfigError
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.plugins import processor
from vlmrl.preflight import plan_of, roles_of

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
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_supervised_training_looks_at_the_answers(
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
        (
            ["--ds.lora.rank", "8", "--ds.lora.target_modules", "qkv", "--actor.freeze_visual_encoder"],
            "reaches into the frozen vision tower",
        ),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    flags: list[str], line: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run("rl", model, tmp_path / "out", *flags) == 2
    shown = capsys.readouterr().err.strip()
    assert line in shown
    assert shown.count("\n") == 0
    assert "Traceback" not in shown


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
        return plan_of(config, processor(model, min_pixels=3136, max_pixels=12544))

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
