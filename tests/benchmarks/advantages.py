"""Time the advantages of one step on one core, for each estimator.

    .venv/bin/python tests/benchmarks/advantages.py

The default workload is 1,024 responses of 8,192 tokens in groups of 8: a prompt, a response of two turns with tokens of
an environment between them, a KL in the reward, and a critic's values for gae. The fastest of several repeats counts.
The exit status is 1 if an estimator takes longer than `--most` seconds.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from vlmrl.algorithms.advantages import advantages
from vlmrl.config.built_in import ESTIMATORS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt and its response")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="tokens per reasoning step with a process reward; 0: none")
    parser.add_argument("--most", type=float, default=0.5, help="time limit of an estimator in seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = arguments.tokens
    sampled = torch.ones(arguments.responses, tokens, dtype=torch.bool)
    sampled[:, : tokens // 32] = False
    sampled[:, tokens // 2 : tokens // 2 + tokens // 64] = False
    rewards = torch.rand(arguments.responses // arguments.group, arguments.group)
    kl_penalty, values = 0.01 * torch.randn(sampled.shape), torch.randn(sampled.shape)
    process_rewards = {}
    if arguments.steps:
        ends = sampled & (torch.arange(tokens) % arguments.steps == 0)
        process_rewards["token_rewards"] = torch.where(ends, torch.rand(sampled.shape), 0.0)
    slowest = 0.0
    for estimator, row in ESTIMATORS.items():
        critic = values if row.needs_critic else None
        seconds = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            advantages(
                rewards,
                sampled,
                estimator=estimator,
                gamma=0.99,
                lambd=0.95,
                kl_penalty=kl_penalty,
                values=critic,
                **process_rewards,
            )
            seconds.append(time.perf_counter() - start)
        slowest = max(slowest, min(seconds))
        print(f"{estimator:20} {min(seconds):.3f} s", flush=True)
    sys.exit(slowest > arguments.most)


if __name__ == "__main__":
    main()
