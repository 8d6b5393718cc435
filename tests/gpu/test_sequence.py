"""The exchange of tokens for heads over NCCL, with PyTorch's varlen kernel, which gets slices of one received tensor.

With one rank an exchange changes nothing: what several ranks compute is tested on CPU.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed

from vlmrl.models.attention import packed_attention
from vlmrl.models.attention_plan import Span, plan_attention
from vlmrl.models.sequence import SequenceGroup, SequenceShard

SPANS = (Span(0, 70), Span(70, 9, 0), Span(79, 21, 0), Span(100, 29))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_one_rank_is_unchanged(dtype: torch.dtype, tmp_path: Path) -> None:
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    handle = torch.distributed.group.WORLD
    assert handle is not None
    shard = SequenceShard(SequenceGroup(handle, 0, 1), 129)
    torch.manual_seed(0)
    shapes = ((1, 129, 8, 64), (1, 129, 2, 64), (1, 129, 2, 64))
    states = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    plan = plan_attention(SPANS, causal=True)
    results = []
    for sequence in (None, shard):
        heads = [each.transpose(1, 2) for each in states]
        output, _ = packed_attention(
            torch.nn.Module(), *heads, None, is_causal=True, attention_plan=plan, sequence_shard=sequence
        )
        results.append((output, *torch.autograd.grad(output.float().square().sum(), states)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
