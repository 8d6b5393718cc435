"""The checks of the self-test on machines with faults."""

from __future__ import annotations

import importlib
from pathlib import Path

import psutil
import pytest
import torch
from processes import command

from vlmrl.commands.self_test import layers, ranks, training
from vlmrl.commands.self_test.outcome import Broken
from vlmrl.commands.self_test.themes import THEMES

STEP = {"policy/loss": 0.0, "sync/logprob_diff_mean": 1e-6, "time/rollout_s": 0.5, "time/update_s": 1.25}


def test_every_check_names_an_existing_function_and_settings_that_avoid_it() -> None:
    checks = [check for theme in THEMES for check in theme.checks]
    assert len({check.name for check in checks}) == len(checks)
    for name in [*(theme.setup for theme in THEMES), *(check.function for check in checks)]:
        module, function = name.split(":")
        # Heavy imports are the theme's process's own.
        path = Path(training.__file__).parent / f"{module.rpartition('.')[2]}.py"
        assert f"def {function}(" in path.read_text(), name
    assert all(check.avoid for check in checks)


def test_ranks_that_hang_are_reported_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(ranks.__file__).parents[3]))
    # They are still importing torch then.
    monkeypatch.setattr(ranks, "_TIMEOUT_S", 0.2)
    with pytest.raises(Broken, match=r"rank 0 of 2 has not finished after 0\.4 s"):
        ranks.check(tmp_path)
    assert not [one for one in psutil.Process().children() if "vlmrl.commands.self_test.ranks" in command(one)]


def test_four_bit_layers_compute_with_their_dequantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers.nf4(None).startswith("rounding 8%")
    functional = importlib.import_module("bitsandbytes.functional")
    sound = functional.dequantize_4bit
    monkeypatch.setattr(functional, "dequantize_4bit", lambda *given, **options: 1.01 * sound(*given, **options))
    with pytest.raises(Broken, match="the relative error of an NF4 layer on cpu is"):
        layers.nf4(None)


def test_a_run_is_summarized_by_gaps_image_effects_and_seconds() -> None:
    seen = STEP | {"verify/images/engine_effect": 0.2, "verify/images/old_effect": 0.1}
    assert training.format_steps([seen, STEP]) == (
        "engine and trainer differ by 1e-06, images change log-probs by 0.1; seconds: rollout 0.5, update 1.2"
    )
    with pytest.raises(Broken, match="1 steps of 2"):
        training.format_steps([seen])
    with pytest.raises(Broken, match="did not check that"):
        training.format_steps([STEP, STEP])


def test_a_refused_run_is_reported_with_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.models, "build", lambda folder: str(folder / "no" / "model"))
    with pytest.raises(Broken, match=r"the run ended with code 2: vlmrl rl: .*there is no folder .*no/model"):
        training.check(tmp_path)


def test_a_buffer_that_was_rounded_is_named(tmp_path: Path) -> None:
    stages = importlib.import_module("vlmrl.commands.self_test.stages")
    model = training.models.build(tmp_path)
    net = stages.load_model(model, dtype=torch.float32, attn_implementation=None)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    assert stages.fault_of_buffers(model, buffers) is None
    name = "model.language_model.rotary_emb.inv_freq"
    rounded = buffers | {name: buffers[name].bfloat16()}
    assert stages.fault_of_buffers(model, rounded) is not None
    assert stages.fault_of_buffers(model, rounded).startswith(f"{name} is off by")
    assert stages.fault_of_buffers(model, rounded).endswith("as bfloat16")
