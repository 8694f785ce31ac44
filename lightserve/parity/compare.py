"""How far the logits of two engines are apart, and whether that is rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div

ROWS_AT_ONCE = 64  # float64 copies of so many rows of a vocabulary fit beside a model


@dataclass(frozen=True, slots=True)
class LogitDifference:
    rows: int
    max_diff: float
    mean_diff: float
    largest: float  # logit of the reference, without its sign
    kl: float  # mean over the rows, of the reference's distribution from ours, in nats
    same_argmax: int  # rows

    @property
    def relative(self) -> float:
        return self.max_diff / max(self.largest, torch.finfo(torch.float32).tiny)

    @property
    def agreement(self) -> float:
        """The share of rows in which the same token is the most likely one."""
        return self.same_argmax / max(self.rows, 1)


def row_errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """The largest difference of each row. NaN and infinity of ours stay, so that no tolerance holds."""
    return (ours.float() - theirs.float()).abs().amax(-1)


def compare_logits(ours: Tensor, theirs: Tensor) -> LogitDifference:
    """Both are ``[rows, vocab]``."""
    if ours.shape != theirs.shape:
        raise ValueError(f"logits of {tuple(ours.shape)} cannot be compared with {tuple(theirs.shape)}")
    starts = range(0, len(ours), ROWS_AT_ONCE)
    pieces = ((ours[start : start + ROWS_AT_ONCE], theirs[start : start + ROWS_AT_ONCE]) for start in starts)
    return combined([_compare_piece(our.float().cpu(), their.float().cpu()) for our, their in pieces])


def _compare_piece(ours: Tensor, theirs: Tensor) -> LogitDifference:
    expected, computed = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    kl = kl_div(computed, expected, reduction="sum", log_target=True) / max(len(ours), 1)
    return LogitDifference(
        len(ours),
        float(row_errors(ours, theirs).max()),
        float((ours - theirs).abs().mean()),
        float(theirs.abs().max()),
        float(kl),
        int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
    )


def combined(differences: Sequence[LogitDifference]) -> LogitDifference:
    """Of all rows together."""
    rows = sum(difference.rows for difference in differences)
    # a tensor's maximum is NaN if a value is; that of Python depends on the order
    most = torch.tensor([[difference.max_diff, difference.largest] for difference in differences]).amax(0).tolist()
    means = torch.tensor([[difference.mean_diff, difference.kl] for difference in differences], dtype=torch.float64)
    weights = torch.tensor([difference.rows for difference in differences], dtype=torch.float64)[:, None] / max(rows, 1)
    mean_diff, kl = (means * weights).sum(0).tolist()
    return LogitDifference(
        rows, most[0], mean_diff, most[1], kl, sum(difference.same_argmax for difference in differences)
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as rounding."""

    relative: float  # the largest difference, divided by the largest logit
    kl: float  # mean, in nats
    perplexity: float  # relative

    def holds(self, difference: LogitDifference) -> bool:
        return difference.relative <= self.relative and difference.kl <= self.kl


# Roundings of the dtype through all layers, beside a reference in float32.
LIMITS = {
    torch.float32: Limits(1e-3, 1e-6, 1e-4),
    torch.float16: Limits(2e-2, 1e-3, 1e-2),
    torch.bfloat16: Limits(1e-1, 1e-2, 2e-2),
}
# Inputs or KV are rounded to 8 bits, or weights are quantised while loading: the text may differ, its quality may not.
QUANTIZED = Limits(float("inf"), 5e-2, 5e-2)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The place of the first token that differs, or at which one text ends; None: they are the same."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
