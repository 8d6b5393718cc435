"""`make quickstart`: train a tiny Qwen2.5-VL on visual math with Ray, vLLM and DeepSpeed, on two CPU cores.

`make quickstart-qlora` does the same with a 4-bit base, of which only the adapters are trained and synced; `make
quickstart-agent` trains on episodes of an environment, and draws one. The last line is one JSON object: held-out
accuracy before and after, seconds, peak memory.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmrl import startup
from vlmrl.commands.exit_code import exit_code
from vlmrl.config.load import load
from vlmrl.config.stages import SftConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.system.stops import handle_signals

_RUNS = Path("runs")


@dataclass(frozen=True)
class _Variant:
    """A quickstart: its folder in `runs/` and its two stages."""

    folder: str
    warm_up: tuple[str, ...]
    """Flags of `vlmrl sft`."""
    recipe: tuple[str, ...]
    """Flags of `vlmrl rl`."""
    accuracy: str
    """Name of what pass@1 measures."""
    next: str
    """Command to try next."""


_COUNTING = ("--config", "examples/counting_tiny.yaml", "--config")
_WARM_UP = ("--config", "examples/quickstart_sft.yaml")
_VARIANTS = {
    "": _Variant(
        "quickstart",
        _WARM_UP,
        (*_COUNTING, "examples/counting_tiny/quickstart.yaml"),
        "Accuracy on held-out prompts",
        ".venv/bin/vlmrl rl --config examples/visual_math_tiny.yaml --rollout.temperature 0.8",
    ),
    "qlora": _Variant(
        "quickstart_qlora",
        (
            *_WARM_UP,
            *("--actor.model_name_or_path", "runs/quickstart_qlora/start"),
            *("--ckpt.output_dir", "runs/quickstart_qlora/sft"),
        ),
        (*_COUNTING, "examples/counting_tiny/quickstart_qlora.yaml"),
        "Accuracy on held-out prompts",
        ".venv/bin/vlmrl merge --merge.adapter runs/quickstart_qlora/rl/adapter --merge.output "
        "runs/quickstart_qlora/merged --merge.model_name_or_path runs/quickstart_qlora/sft/model",
    ),
    "agent": _Variant(
        "quickstart_agent",
        ("--config", "examples/steer_tiny_sft.yaml"),
        ("--config", "examples/steer_tiny.yaml"),
        "Held-out episodes that reach the goal",
        "your own environment: --train.agent_func_path my_env.py:make, as examples/agents/steer.py",
    ),
}


def main(argv: Sequence[str] = ()) -> int:
    """Build a model, fine-tune it, train it with RL, and print the result; `argv` is empty, or names a variant.

    Returns the exit code.
    """
    return exit_code(lambda: _main(argv), "quickstart")


def _main(argv: Sequence[str]) -> int:
    variant = _VARIANTS.get(" ".join(argv))
    if variant is None:
        names = " or ".join(filter(None, _VARIANTS))
        print(f"quickstart takes no argument or {names}, not {' '.join(argv)}", file=sys.stderr)
        return 2
    folder = _RUNS / variant.folder
    startup.prepare()
    started = time.monotonic()
    set_aside(folder)
    memory = _PeakMemory()
    model = folder / "start"
    print(f"1/3  a Qwen2.5-VL of 1.6M random weights -> {model}", flush=True)
    from vlmrl.models import tiny

    tiny.build("qwen2_5_vl", model)
    stages = (
        ("supervised warm-up", "sft", variant.warm_up, _train_sft),
        ("reinforcement learning, GRPO", "rl", variant.recipe, _train_rl),
    )
    for number, (title, verb, words, train) in enumerate(stages, start=2):
        print(f"\n{number}/3  {title}: vlmrl {verb} {' '.join(words)}", flush=True)
        train(words)
    accuracies = _accuracies(folder / "rl" / "metrics.jsonl")
    result = {
        "before": accuracies[0],
        "after": accuracies[-1],
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_gib": round(memory.stop(), 2),
    }
    print(f"\n{variant.accuracy}: {result['before']:.0%} before GRPO, {result['after']:.0%} after.")
    print(f"Look at:   {folder / 'rl' / 'report.html'} in a browser")
    print(f"Curves:    {folder / 'rl' / 'curves.png'}")
    print(f"Responses: {folder / 'rl' / 'rollouts'}")
    if variant is _VARIANTS["agent"]:
        print(f"Episode:   {_draw_last_episode(folder / 'rl' / 'rollouts', folder / 'episode.png')}")
    print(f"Try next:  {variant.next}")
    print(json.dumps(result), flush=True)
    return 0


def _draw_last_episode(rollouts: Path, out: Path) -> Path:
    """Draw the longest rewarded episode of the last evaluation; return the picture's path."""
    from vlmrl.observe.episode_picture import draw_episode, longest_episode

    last = max(rollouts.glob("eval_*_step_*.jsonl"))
    record, number = longest_episode(last)
    draw_episode(record, number, media=rollouts / "media", out=out)
    return out


def _train_sft(words: Sequence[str]) -> None:
    from vlmrl.commands.sft import train_sft

    config = load(SftConfig, words)
    with handle_signals(config.train.stop_grace_s):
        train_sft(config)


def _train_rl(words: Sequence[str]) -> None:
    from vlmrl.commands.rl import train_rl

    config = load(RlConfig, words)
    with handle_signals(config.train.stop_grace_s):
        train_rl(config)


def set_aside(folder: Path) -> None:
    """Rename the results of an earlier quickstart."""
    if folder.exists():
        aside = folder.with_name(
            f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(folder.stat().st_mtime))}"
        )
        folder.rename(aside)
        print(f"the results of an earlier quickstart are now in {aside}")


def _accuracies(metrics: Path) -> list[float]:
    """pass@1 of every evaluation of the run, in order."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rates = [
        value for line in lines for name, value in line.items() if name.startswith("eval/") and name.endswith("/pass@1")
    ]
    assert rates, f"{metrics} holds no evaluation"
    return [float(rate) for rate in rates]


class _PeakMemory:
    """Measures the peak memory of this process and its descendants, in GiB; shared pages count once."""

    def __init__(self) -> None:
        self._peak = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        import psutil

        this = psutil.Process()
        while not self._done.wait(2.0):
            total = 0
            for process in [this, *this.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:  # it has ended since it was listed
                    continue
            self._peak = max(self._peak, total / 2**30)

    def stop(self) -> float:
        self._done.set()
        self._thread.join()
        return self._peak


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
