"""A run on a disk that fills up ends with one line, and resumes from the last complete checkpoint, also with another
batch size."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_disk import small_disk
from test_resume import read_metrics

from vlmrl.observe.run_folder import RunFolder
from vlmrl.system.atomic_folders import checkpoints
from vlmrl.system.storage import size_of

ROWS = 48


def sft(model: str, out: Path, *words: str) -> subprocess.Popen[str]:
    flags = {
        "actor.model_name_or_path": model,
        "actor.lr_scheduler": "linear",
        "actor.lr_warmup_ratio": "0",
        "data.prompt_dataset": f"visual_math?families=count&difficulty=1&pixels=56&size={ROWS}",
        "data.max_len": "128",
        "ds.param_dtype": "fp32",
        "ckpt.save_steps": "1",
        "ckpt.output_dir": str(out),
    }
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "vlmrl", "sft", *given, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def filled(disk: Path, *, leave: int) -> Path:
    """Fill the disk as another process would, but for `leave` bytes; never more, as the run writes meanwhile."""
    filler, piece = disk / "filler", bytes(2**20)
    with filler.open("wb", buffering=0) as file:
        while (free := shutil.disk_usage(disk).free - leave) > 0:
            file.write(piece[:free])
    return filler


@pytest.mark.prove
def test_a_full_disk_ends_a_run_with_one_line_and_loses_nothing(tmp_path: Path, tiny_model: Callable[..., str]) -> None:
    model = tiny_model("qwen2_5_vl", size="micro")
    with small_disk(tmp_path / "disk", mib=320) as disk:
        folder = RunFolder(disk / "run")
        run = sft(model, folder.root, "--train.batch_size", "2", "--ckpt.max_num", "90")
        while not checkpoints(folder.checkpoints) and run.poll() is None:
            time.sleep(0.02)
        filler = filled(disk, leave=size_of(folder.checkpoint(1)) // 2)
        out, errors = run.communicate(timeout=120)
        assert run.returncode == 2, errors[-3000:]
        *_, newest = saved = checkpoints(folder.checkpoints)
        (line,) = [line for line in errors.splitlines() if line.startswith("vlmrl sft: ")]
        # The disk became full before the next checkpoint, or while it was written.
        assert re.search(
            r"step_?\d* .*(takes about .*has no room|cannot be written to .*No space left on device)", line
        )
        assert line.endswith(f"; {newest} is complete: resume from it with --ckpt.load_enable")
        assert "Traceback" not in out + errors
        assert not list(folder.checkpoints.glob("*.tmp")), "half a checkpoint keeps a full disk full"

        filler.unlink()
        rest = sft(model, folder.root, "--train.batch_size", "4", "--ckpt.load_enable")
        out, errors = rest.communicate(timeout=120)
        assert rest.returncode == 0, errors[-3000:]
        output = " ".join(out.split())
        assert f"resuming after step {len(saved)} with other settings: " in output
        assert "train.batch_size 2 -> 4" in output
        # The remaining rows in batches of 4; the learning rate continues from the position in the data.
        drawn = 2 * len(saved)
        metrics = read_metrics(folder.root)
        assert max(metrics) == len(saved) + (ROWS - drawn) // 4
        assert metrics[len(saved) + 1]["policy/lr"] == pytest.approx(1e-6 * (1 - drawn / ROWS))
