"""Every recipe for machines without a GPU, as the guide calls it, for one step with a tiny model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guide_commands import ROOT, commands
from preferences import teach
from recipes import read_metrics

from vlmrl.commands.dpo import train_dpo
from vlmrl.commands.generate import generate
from vlmrl.commands.rl import train_rl
from vlmrl.commands.rm import train_rm
from vlmrl.commands.sft import train_sft
from vlmrl.config.load import load
from vlmrl.config.names import setting_value
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verb_list import VERBS
from vlmrl.config.verbs import RlConfig

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.prove]

OTHER_TESTS = {"http_reward": "test_reward_server.py, which starts the server"}
"""Recipes that are run elsewhere."""
RUN: dict[str, Callable[[Any], None]] = {
    "rl": train_rl,
    "sft": train_sft,
    "rm": train_rm,
    "dpo": train_dpo,
    "generate": generate,
}
RECIPES = list(
    dict.fromkeys(
        " ".join(re.findall(r"^vlmrl \w+|--config \S+", command.line))
        for command in commands("examples/README.md")
        if command.line.startswith("vlmrl ") and not command.needs_gpus
    )
)
SOLVED = {"dapo": "odd_are_solved", "generate_tiny": "odd_are_solved"}
"""Rewards for recipes that a random policy cannot solve at all."""


def name_of(command: str) -> str:
    return Path(command.split()[-1]).stem


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., str]) -> Callable[[str, str], str]:
    """`start("reward.model_name_or_path", "runs/...")` is what stands here for the result of an earlier command."""
    folder = tmp_path_factory.mktemp("start")
    reward_model = folder / "reward_model"
    tools = folder / "tools"

    def find(setting: str, path: str) -> str:
        if "tools_tiny" in path:
            if not tools.exists():
                script = str(ROOT / "examples/agents/calculator_start.py")
                subprocess.run([sys.executable, script, str(tools)], check=True)
            return str(tools / ("start" if setting.startswith("actor.") else Path(path).name))
        if path.endswith("generated.jsonl"):
            rows = [{"input": f"{n} + 1?", "answer": str(n + 1)} for n in range(8)]
            (folder / "generated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            return str(folder / "generated.jsonl")
        families = ("qwen3_vl_moe", "qwen3_vl", "qwen3_5", "qwen3", "internvl")
        family = next((family for family in families if f"/{family}" in path), "qwen2_5_vl")
        if setting.startswith("reward."):
            if not reward_model.exists():
                teach(tiny_model(family), reward_model, steps=1, batch_size=4, lr=1e-3)
            return str(reward_model)
        return tiny_model(family)

    return find


def shortened(config: VerbConfig) -> dict[str, Any]:
    """Settings of one step with few rows."""
    keeps_best = getattr(config.ckpt, "best_metric_key", None) is not None
    short: dict[str, Any] = {"train.max_steps": 1, "eval.max_samples": 4, "eval.steps": 1 if keeps_best else -1}
    if isinstance(config, RlConfig):
        n = config.rollout.n_samples_per_prompt
        num_prompts = max(2, 8 // n)
        short |= {"rollout.batch_size": num_prompts, "train.batch_size": num_prompts * n}
        short |= {"rollout.max_new_tokens": min(config.rollout.max_new_tokens, 8), "train.image_check_steps": -1}
        if config.has_critic:
            short["critic.freezing_steps"] = -1
    elif config.verb == "generate":
        # A model that has learnt nothing ends no response, and only `all` keeps those.
        short = {"data.max_samples": 8, "rollout.batch_size": 4, "generate.keep": "all", "generate.min_score": "null"}
        short |= {"rollout.best_of": "null", "rollout.n_samples_per_prompt": 8}
    else:
        short |= {"train.batch_size": 4}
    return {name: value for name, value in short.items() if name in type(config).settings()}


@pytest.mark.parametrize(
    "command", [command for command in RECIPES if name_of(command) not in OTHER_TESTS], ids=name_of
)
def test_a_recipe_runs(
    command: str,
    tmp_path: Path,
    start: Callable[[str, str], str],
    digits_reward: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    _, verb, *words = shlex.split(command)
    (kind,) = (kind for kind in VERBS if kind.verb == verb)
    config = load(kind, words)
    flags = shortened(config)
    for name in kind.settings():
        value = setting_value(config, name)
        if isinstance(value, str) and value.startswith("runs/"):
            flags[name] = start(name, value)
    if (function := SOLVED.get(name_of(command))) is not None:
        flags |= {"reward.functions": "{}", "reward.remote_url": digits_reward.replace(":digits", f":{function}")}
    out = flags["ckpt.output_dir"] = tmp_path / "run"
    unread = config.unread()
    given = [word for name, value in flags.items() if name not in unread for word in (f"--{name}", str(value))]
    RUN[verb](load(kind, [*words, *given]))
    if verb == "generate":
        assert (out / "generated.jsonl").exists()
        return
    assert max(record["step"] for record in read_metrics(out)) >= 1
    model = out / ("adapter" if (out / "adapter").exists() else "model")
    assert "## How it was verified" in (model / "README.md").read_text()


def test_recipes_that_run_elsewhere_are_in_the_guide() -> None:
    assert OTHER_TESTS.keys() <= set(map(name_of, RECIPES))
