"""The tokens of prompts whose logprobs a step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lightserve.messages.int_arrays import Int32Array
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.logprobs import NO_CANDIDATE, PromptChunk, StepPromptLogprobs


class PromptTargets(NamedTuple):
    """Those of a request."""

    req: InferReq
    start: int  # the row of the step whose logits are those of the first target; the others follow
    targets: list[int]
    candidates: Int32Array | None  # [targets, count]: other tokens that might stand there; None: the client has none


def step_logprobs(entries: Sequence[PromptTargets], device: torch.device) -> StepPromptLogprobs:
    """Each request gets its chunk of them."""
    rows = [row for entry in entries for row in range(entry.start, entry.start + len(entry.targets))]
    targets = [target for entry in entries for target in entry.targets]
    k = max(entry.req.sampling.prompt_logprobs or 0 for entry in entries)
    logprobs = StepPromptLogprobs(rows, targets, k, device, _joined_candidates(entries))
    begin = 0
    for entry in entries:
        assert entry.req.prompt_chunks is not None
        entry.req.prompt_chunks.append(PromptChunk(logprobs, slice(begin, begin + len(entry.targets))))
        begin += len(entry.targets)
    return logprobs


def _joined_candidates(entries: Sequence[PromptTargets]) -> Int32Array:
    """In as many columns as one of the requests needs."""
    count = max((0 if entry.candidates is None else entry.candidates.shape[1] for entry in entries), default=0)
    joined = np.full((sum(len(entry.targets) for entry in entries), count), NO_CANDIDATE, np.int32)
    begin = 0
    for entry in entries:
        if entry.candidates is not None:
            joined[begin : begin + len(entry.targets), : entry.candidates.shape[1]] = entry.candidates
        begin += len(entry.targets)
    return joined
