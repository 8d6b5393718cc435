"""Peak memory of the KL divergence over the vocabulary, forward and backward: slices against full logits.

    .venv/bin/python tests/benchmarks/divergence_memory.py --tokens 1024

The output layers have the rows of Qwen2.5-VL 3B and 7B. One JSON line per method.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from vlmrl.commands.bench.memory import peak_bytes
from vlmrl.models.divergence import TeacherRows, token_divergence

STUDENT_ROWS, TEACHER_ROWS = 151_936, 152_064


def full(hidden: Tensor, weight: Tensor, teacher: TeacherRows) -> Tensor:
    """Return KL(teacher || student) [T] from all logits."""
    log_p = (hidden @ weight.T).log_softmax(-1)
    log_q = (teacher.hidden @ teacher.weight[: len(weight)].T).log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def sliced(hidden: Tensor, weight: Tensor, teacher: TeacherRows) -> Tensor:
    """Return the same as training computes it."""
    return token_divergence(hidden, weight, None, teacher)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    scale = 2 / arguments.hidden**0.5
    hidden = torch.randn(arguments.tokens, arguments.hidden).requires_grad_()
    weight = (torch.randn(STUDENT_ROWS, arguments.hidden) * scale).requires_grad_()
    states = torch.randn(arguments.tokens, arguments.hidden)
    teacher = TeacherRows(states, torch.randn(TEACHER_ROWS, arguments.hidden) * scale, None, "forward")
    gradients = (hidden.nbytes + weight.nbytes) / 2**20
    outputs = {}
    for method in (sliced, full):

        def work(method: object = method) -> None:
            value = method(hidden, weight, teacher).mean()  # type: ignore[operator]
            outputs[method] = (value.detach(), *torch.autograd.grad(value, (hidden, weight)))

        peak = peak_bytes(work, torch.device("cpu"))
        line = {"method": method.__name__, "tokens": arguments.tokens, "gradients_mib": round(gradients)}
        print(json.dumps(line | {"peak_mib": None if peak is None else round(peak / 2**20)}))
    gaps = [float((a - b).abs().max()) for a, b in zip(outputs[sliced], outputs[full], strict=True)]
    print(json.dumps({"largest_differences": gaps}))


if __name__ == "__main__":
    main()
