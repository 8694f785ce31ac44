"""Which drafts of a step are accepted.

A step with drafts has several rows of logits for a request: those after its next token, and those after each draft. A
token of every row is sampled as if there were no drafts, with the noise of its position. A draft is accepted if the row
before it has sampled just this token, and all drafts before it are accepted. The first row whose draft is not accepted
has sampled the token that follows, so nothing is sampled again.

This is rejection sampling for drafts that were not drawn at random. The row samples the draft with its probability p.
Otherwise it samples another token with the probability that the token has among the others. So the text has the
distribution of the model, whatever is drafted. It is even the same text: greedily, and with a seed too, because the
noise depends only on (seed, position, token). This holds as far as the logits do. On a GPU the last bit of a logit may
depend on the shape of the step (see --deterministic), and two tokens that differ by less may change places.

If the rules of a request depend on its output, a row is sampled as if the drafts before it were accepted: see
drafted_req.py. If they are not, the row does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common.ops.step import NO_DRAFT as NO_DRAFT


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Accepts so many drafts of a step on average, whatever is sampled: to measure speed without a trained drafter.

    Of all schedules with this average it is the one whose steps differ least: the first drafts are always accepted, the
    next one sometimes, and the others never. The text means nothing.
    """

    always: int
    sometimes: float  # how often the draft after those is accepted

    @classmethod
    def of_length(cls, length: float) -> SyntheticAcceptance:
        """``length``: tokens of a step, the one after the accepted drafts included."""
        always = int(length - 1)
        return cls(always, length - 1 - always)

    def accepts(self, number: Tensor, b_seed: Tensor, b_position: Tensor) -> Tensor:
        """``number``: of the draft in its request and step, 0 for the first. All are ``[rows]``."""
        hashed = (b_seed * 0x9E3779B1 + b_position.long() * 0x85EBCA6B) & 0x7FFFFFFF
        hashed = ((hashed >> 15 ^ hashed) * 0x2C1B3C6D) & 0x7FFFFFFF
        hashed = ((hashed >> 12 ^ hashed) * 0x297A2D39) & 0x7FFFFFFF
        is_chosen = (hashed >> 15 ^ hashed).double() < self.sometimes * 2**31
        return (number < self.always) | ((number == self.always) & is_chosen)


class Verified(NamedTuple):
    """``[requests]`` int64 each."""

    counts: Tensor  # tokens that a request gets: its accepted drafts, and one that was sampled after them
    last_ids: Tensor  # that one, or NO_TOKEN


def verify(sampled: Tensor, drafts_after: Tensor, first_rows: Tensor, max_drafts: int) -> Verified:
    """Compare the drafts of a step with what was sampled before each of them.

    ``sampled`` and ``drafts_after`` are ``[rows]`` int64: the token of each row, and the draft that comes after it or
    NO_DRAFT, as in the last row of a request. ``first_rows`` ``[requests]`` int64. The tokens of a request are those of
    its first ``counts`` rows.
    """
    return accept((sampled == drafts_after) & (drafts_after != NO_DRAFT), sampled, first_rows, max_drafts)


def accept(is_accepted: Tensor, sampled: Tensor, first_rows: Tensor, max_drafts: int) -> Verified:
    """As ``verify``. ``is_accepted`` ``[rows]``: whether there is a draft after the row, and it may be accepted."""
    rows = first_rows[:, None] + torch.arange(max_drafts, device=sampled.device)
    # a request that has fewer drafts has a row without one before the rows of the next request
    accepted = is_accepted[rows.clamp(max=len(sampled) - 1)].cumprod(-1).sum(-1)
    return Verified(accepted + 1, sampled[first_rows + accepted])
