"""A run whose responses are scored by `vlmrl serve-rm` over HTTP, with images and a token."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recipes import recipe, steps_of

from vlmrl.commands.rl import train_rl
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("ray_session")

SEES = '''
def sees(prompt, response, label, images, metadata):
    """The length of the response, if the whole row was sent: an image of 112x112 pixels, label and family."""
    assert [image.size for image in images] == [(112, 112)], images
    assert int(label) >= 0 and metadata["family"] == "count" and prompt, (label, metadata, prompt)
    return {"total": len(response) / 10, "pictures": len(images)}
'''


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a server in its own process."""
    monkeypatch.setenv("VLMRL_RM_TOKEN", "s3cret")
    (tmp_path / "sees.py").write_text(SEES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--reward.remote_url", f"{tmp_path / 'sees.py'}:sees", "--serve.port", str(port)]
    command = [sys.executable, "-m", "vlmrl", "serve-rm", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ), text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().rpartition(" ")[2].strip()
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0


def test_a_server_scores_what_a_run_samples(
    url: str, tmp_path: Path, tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    flags = {
        "data.prompt_dataset": "visual_math?families=count&difficulty=1&pixels=112&size=64",
        "reward.remote_url": url,
        "reward.remote_images": "data",
        "reward.remote_weight": 2.0,
        "reward.functions": "{format: 1.0}",
        "reward.max_failed_fraction": 0.0,
        "rollout.batch_size": 4,
        "train.batch_size": 32,
        "train.max_steps": 2,
        "eval.max_samples": 8,
    }
    words = recipe("counting_tiny/http_reward.yaml", tiny_model("qwen2_5_vl"), out, **flags)
    train_rl(load(RlConfig, words))
    steps = steps_of(out)
    assert len(steps) == 2
    for line in steps:
        assert line["reward/parts/remote"] > 0
        assert line["reward/parts/remote/sees_pictures"] == 1.0
        expected = 2.0 * line["reward/parts/remote"] + line["reward/parts/format"]
        assert line["reward/mean"] == pytest.approx(expected, abs=1e-6)
    written = [file for file in out.rglob("*") if file.is_file() and b"s3cret" in file.read_bytes()]
    assert written == []
    monkeypatch.setenv("VLMRL_RM_TOKEN", "guessed")
    with pytest.raises(ConfigError, match="refuses the token"):
        train_rl(load(RlConfig, [*words, "--ckpt.output_dir", str(tmp_path / "again")]))
