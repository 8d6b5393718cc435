"""Every command in a guide is run by a test, or its block says that it needs GPUs."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest
from guide_commands import GUIDES, ROOT, Command, commands, texts_before_gpu_blocks


class Run(NamedTuple):
    """The test that runs the commands of a pattern."""

    guide: str
    command: str
    """As for `fnmatch`."""
    test: str
    """`file::function` in `tests/`."""


RECIPE = "end_to_end/test_recipes.py::test_a_recipe_runs"
BENCH = "end_to_end/test_bench.py"
SCRIPT = "end_to_end/test_benchmark_scripts.py::test_a_script_runs"
RUNS = [
    Run("README.md", "make quickstart", "end_to_end/test_rl.py::test_the_quickstart_in_short"),
    Run("README.md", "make quickstart-qlora", "end_to_end/test_rl.py::test_the_quickstart_in_short"),
    Run("README.md", "make quickstart-agent", "end_to_end/test_steer.py::test_two_steps_with_images_in_every_turn"),
    Run("README.md", "make test", "unit/test_guide_runs.py::test_every_command_is_run_or_needs_gpus"),
    Run("README.md", "vlmrl push *", "unit/commands/test_push.py::test_a_model_is_uploaded_as_it_is"),
    Run("README.md", "vlmrl serve-rm --reward.remote_url *", "end_to_end/test_reward_server.py"),
    Run("datasets/README.md", "vlmrl generate *", "end_to_end/test_generate.py::test_responses_with_their_images"),
    Run("datasets/README.md", "vlmrl sft * runs/best/generated.jsonl *", "end_to_end/test_generate.py"),
    Run("datasets/README.md", "vlmrl eval *", "end_to_end/test_generate.py"),
    Run("datasets/README.md", "vlmrl *", "unit/test_datasets_guide.py::test_every_command_reads_every_row"),
    Run(
        "examples/README.md",
        "vlmrl rl * --config examples/counting_tiny/http_reward.yaml",
        "end_to_end/test_reward_server.py",
    ),
    Run("examples/README.md", "vlmrl *", RECIPE),
    Run("examples/README.md", "ray start *", "end_to_end/test_machines.py"),
    Run("examples/README.md", "RAY_ADDRESS=auto vlmrl rl *", "end_to_end/test_machines.py"),
    Run("examples/slurm/README.md", "sbatch *", "end_to_end/test_slurm.py"),
    Run("examples/slurm/README.md", "scancel *", "unit/test_slurm_script.py"),
    Run("examples/kuberay/README.md", "RAY_AUTH_MODE=token * ray start *", "end_to_end/test_job_submit.py"),
    Run("examples/kuberay/README.md", "ray job *", "end_to_end/test_job_submit.py"),
    Run("examples/kuberay/README.md", "kubectl *", "unit/test_kuberay_manifest.py::test_kuberay_knows_every_field"),
    Run("vlmrl/agents/gateway/README.md", "vlmrl serve *", "end_to_end/test_gateway.py"),
    Run("vlmrl/agents/gateway/README.md", "curl *", "unit/test_gateway_guide.py::test_a_request_by_curl"),
    Run("vlmrl/agents/gateway/README.md", "vlmrl eval *", "end_to_end/test_steer.py"),
    Run("vlmrl/config/README.md", "vlmrl rl *", RECIPE),
    Run("vlmrl/hub/README.md", "vlmrl push * --dry-run", "unit/commands/test_push.py::test_a_dry_run_needs_neither_*"),
    Run("vlmrl/hub/README.md", "vlmrl push *", "unit/commands/test_push.py::test_a_model_is_uploaded_as_it_is"),
    Run("vlmrl/models/README.md", "python -m vlmrl.models.tiny *", "unit/models/test_tiny.py"),
    Run("vlmrl/models/README.md", "vlmrl merge *", "unit/commands/test_merge.py"),
    Run("vlmrl/models/README.md", "vlmrl doctor *", "unit/commands/test_memory.py"),
    Run("vlmrl/rewards/README.md", "vlmrl rm *", RECIPE),
    Run("vlmrl/rewards/README.md", "vlmrl serve-rm *", "end_to_end/test_reward_server.py"),
    Run("vlmrl/rewards/README.md", "VLMRL_RM_TOKEN=... vlmrl serve-rm *", "end_to_end/test_reward_server.py"),
    Run("vlmrl/algorithms/README.md", "python examples/compare_preferences.py", "end_to_end/test_dpo.py"),
    Run("vlmrl/algorithms/README.md", "python examples/compare_distillation.py", "end_to_end/test_distillation.py"),
    Run("vlmrl/plan/README.md", "vlmrl plan *", "unit/commands/test_plan.py"),
    Run("vlmrl/report/README.md", "vlmrl report *--serve", "unit/report/test_server.py"),
    Run("vlmrl/report/README.md", "vlmrl report *", "unit/report/test_page.py"),
    Run("tests/benchmarks/README.md", "python -m vlmrl.models.tiny *", "unit/models/test_tiny.py"),
    Run("tests/benchmarks/README.md", "vlmrl bench *", BENCH),
    Run("tests/benchmarks/README.md", "python tests/benchmarks/divergence_memory.py *", SCRIPT),
    Run("tests/benchmarks/README.md", "python tests/benchmarks/advantages.py", SCRIPT),
]
"""The first that fits counts."""
BY_HAND = {
    "python tests/benchmarks/compare_layouts.py *",
    "python tests/benchmarks/compare_trl.py *",
    "python tests/benchmarks/compare_trl_dpo.py *",
    "python tests/benchmarks/compare_trl_sft.py *",
    "python tests/benchmarks/reward_overlap.py",
}
"""Measurements of minutes: the guide has their results with the machine."""
ALL = [command for guide in GUIDES for command in commands(guide)]


def run_of(command: Command) -> Run | None:
    fits = (run for run in RUNS if run.guide == command.guide and fnmatchcase(command.line, run.command))
    return next(fits, None)


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_is_run_or_needs_gpus(guide: str) -> None:
    neither = [
        command.line
        for command in ALL
        if command.guide == guide
        and not command.needs_gpus
        and run_of(command) is None
        and not any(fnmatchcase(command.line, pattern) for pattern in BY_HAND)
    ]
    assert not neither, "name the test that runs it in RUNS, or begin its block with ```bash needs-gpus"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.guide}: {run.command}")
def test_the_tests_exist_and_are_needed(run: Run) -> None:
    file, _, function = run.test.partition("::")
    text = (ROOT / "tests" / file).read_text()
    names = re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)
    assert any(fnmatchcase(name, function or "*") for name in names)
    assert any(run_of(command) is run for command in ALL), "no command of the guide needs this"


def test_measurements_by_hand_are_in_a_guide() -> None:
    for pattern in BY_HAND:
        assert any(fnmatchcase(command.line, pattern) for command in ALL), pattern


@pytest.mark.parametrize("guide", GUIDES)
def test_readers_see_what_needs_gpus(guide: str) -> None:
    for text in texts_before_gpu_blocks(guide):
        assert "GPU" in text, text[-200:]


def test_no_block_of_commands_escapes() -> None:
    for guide in GUIDES:
        fences = re.findall(r"^```(?:bash|sh|shell|console)\b.*$", (ROOT / guide).read_text(), re.MULTILINE)
        assert set(fences) <= {"```bash", "```bash needs-gpus", "```sh"}, guide
