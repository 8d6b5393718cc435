"""`make quickstart`: train a tiny Qwen2.5-VL on visual math with Ray, vLLM and DeepSpeed, on two CPU cores.

`make quickstart-qlora` does the same with a 4-bit base, of which only the adapters are trained and synced. The last
line is one JSON object: held-out accuracy before and after, seconds, peak memory.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from vlmrl import startup
from vlmrl.commands.exit_code import exit_code
from vlmrl.config.load import load
from vlmrl.config.verbs import RlConfig, SftConfig
from vlmrl.system.stops import handle_signals

_RUNS = Path("runs")
_NEXT = {
    "quickstart": ".venv/bin/vlmrl rl --config examples/visual_math_tiny.yaml --rollout.temperature 0.8",
    "quickstart_qlora": ".venv/bin/vlmrl merge --merge.adapter runs/quickstart_qlora/rl/adapter --merge.output "
    "runs/quickstart_qlora/merged --merge.model_name_or_path runs/quickstart_qlora/sft/model",
}
_WARM_UP = ["--config", "examples/quickstart_sft.yaml"]


def main(argv: Sequence[str] = ()) -> int:
    """Build a model, fine-tune it, train it with RL, and print the result; `argv` is empty, or `qlora`.

    Returns the exit code.
    """
    return exit_code(lambda: _main(argv), "quickstart")


def _main(argv: Sequence[str]) -> int:
    if list(argv) not in ([], ["qlora"]):
        print(f"quickstart takes no argument or qlora, not {' '.join(argv)}", file=sys.stderr)
        return 2
    name = "_".join(["quickstart", *argv])
    folder = _RUNS / name
    recipe = ["--config", "examples/counting_tiny.yaml", "--config", f"examples/counting_tiny/{name}.yaml"]
    startup.prepare()
    started = time.monotonic()
    _set_aside(folder)
    memory = _PeakMemory()
    model = folder / "start"
    print(f"1/3  a Qwen2.5-VL of 1.6M random weights -> {model}", flush=True)
    from vlmrl.models import tiny

    tiny.build("qwen2_5_vl", model)
    # The example of the plain quickstart has these paths already.
    paths = ["--actor.model_name_or_path", str(model), "--ckpt.output_dir", str(folder / "sft")] if argv else []
    stages = (
        ("supervised warm-up", "sft", [*_WARM_UP, *paths], _train_sft),
        ("reinforcement learning, GRPO", "rl", recipe, _train_rl),
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
    print(f"\nAccuracy on held-out prompts: {result['before']:.0%} before GRPO, {result['after']:.0%} after.")
    print(f"Curves:    {folder / 'rl' / 'curves.png'}")
    print(f"Responses: {folder / 'rl' / 'rollouts'}")
    print(f"Try next:  {_NEXT[name]}")
    print(json.dumps(result), flush=True)
    return 0


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


def _set_aside(folder: Path) -> None:
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
