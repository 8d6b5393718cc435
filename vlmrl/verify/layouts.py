"""Check before the first update that all layouts compute the same, on the run's own samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vlmrl.data.responses import shortened, to_samples
from vlmrl.errors import SyncError
from vlmrl.types import Group, Layout, Metrics, Sample

_NUM_GROUPS = 2
_NUM_RESPONSES = 2
_NUM_TOKENS = 64
_BOUND = 1e-5
"""Relative. In fp32 correct layouts differ by 1e-6. Positions that are off by one change values by 0.1; a response that
gives a thousandth of its attention to another response, by 0.001."""

Compare = Callable[[Sequence[Sample]], Mapping[Layout, tuple[float, float]]]
"""Relative difference between each layout and `padded` on some samples: of values, of gradients."""


def check_layouts(groups: Sequence[Group], compare: Compare) -> Metrics:
    """Run a few responses through the model's first layers in fp32, in the run's layouts and in `padded`.

    Returns `verify/layouts/values_gap` and `verify/layouts/gradients_gap`, of the layout where each is largest; nothing
    where the run has no layout but `padded`.

    Raises SyncError when a layout differs from `padded` by more than fp32 explains.
    """
    gaps_by_layout = compare(to_samples(_choose(groups)))
    for layout, gaps in gaps_by_layout.items():
        for name, gap in zip(("values", "gradients"), gaps, strict=True):
            if not gap <= _BOUND:
                raise SyncError(
                    f"layout check: {name} of the first layers differ by {gap:.2g} of their size between train.layout "
                    f"{layout} and padded, in fp32 (bound {_BOUND:g}): positions or attention of packed samples are "
                    "wrong; train with --train.layout padded"
                )
    if not gaps_by_layout:
        return {}
    values, gradients = (max(column) for column in zip(*gaps_by_layout.values(), strict=True))
    return {"verify/layouts/values_gap": values, "verify/layouts/gradients_gap": gradients}


def _choose(groups: Sequence[Group]) -> list[Group]:
    """Return the first groups with a few responses each; groups and responses with images come before those without."""
    chosen = []
    for group in sorted(groups, key=lambda group: not group.has_images):
        rollouts = [shortened(rollout, _NUM_TOKENS) for rollout in group.rollouts if rollout.num_sampled]
        rollouts.sort(key=lambda rollout: not any(segment.media for segment in rollout.segments))
        if rollouts:
            chosen.append(Group(group.prompt, tuple(rollouts[:_NUM_RESPONSES])))
    return chosen[:_NUM_GROUPS]
