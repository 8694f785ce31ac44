"""Drafts of a pipeline: its last stage finds them when it has sampled, and the router brings them with the next step.

So all stages compute the same tokens, and only the last one keeps texts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightserve.common.device import copy_to_host
from lightserve.messages.int_arrays import Int64Array, int32s, int64s
from lightserve.messages.step import NO_TOKENS, Step, TokenColumns
from lightserve.worker.sampling.verification import NO_DRAFT


class Proposals(NamedTuple):
    """Drafts of some requests for their next steps."""

    req_ids: Int64Array
    draft_ids: Tensor  # [requests, drafts] int64; NO_DRAFT: there is none, and none after it


class ProposalsOnHost:
    """Proposals whose copy to the host has begun."""

    def __init__(self, proposals: Proposals) -> None:
        self._req_ids = proposals.req_ids
        self._copy = copy_to_host(proposals.draft_ids)

    def columns(self) -> TokenColumns:
        """Wait for the copy. Requests without drafts are left out."""
        (tensor,) = self._copy.tensors()
        draft_ids = tensor.numpy()
        is_draft = (draft_ids != NO_DRAFT).cumprod(axis=1).astype(bool)
        counts = is_draft.sum(axis=1)
        has_drafts = counts > 0
        if not has_drafts.any():
            return NO_TOKENS
        return TokenColumns(self._req_ids[has_drafts], draft_ids[is_draft].astype(np.int32), int32s(counts[has_drafts]))


def drafts_of(step: Step) -> Int64Array:
    """The drafts that the router has put among the tokens of a step."""
    counts = int32s(step.draft_counts).astype(np.int64)
    ends = np.cumsum(counts + 1)
    first = ends - counts
    places = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
    return int64s(int32s(step.token_ids)[places].tolist())
