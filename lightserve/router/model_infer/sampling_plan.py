"""What the parameters of a batch's requests come to, on the device. It holds as long as the requests are the same.

A feature is in the plan only with the rows that use it, and is None (or empty) where none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.io_struct import INT32_MAX
from lightserve.router.model_infer.infer_batch import InferReq
from lightserve.router.model_infer.req_rules import Cuts

Rows = list[tuple[int, InferReq]]  # rows of the logits and whose they are


@dataclass(frozen=True, slots=True)
class Allowed:
    """In ``rows`` nothing may come but the entries."""

    rows: Tensor  # [restricted] int64
    entry_rows: Tensor  # [entries] int64
    token_ids: Tensor  # [entries] int64


@dataclass(frozen=True, slots=True)
class Bias:
    entry_rows: Tensor  # [entries] int64
    token_ids: Tensor  # [entries] int64, each once a row
    values: Tensor  # [entries] float32


@dataclass(frozen=True, slots=True)
class Penalised:
    reqs: list[InferReq]
    penalties: Callable[[Tensor], ops.Penalties]  # of the table of what requests have seen


@dataclass(frozen=True, slots=True)
class TypicalCut:
    rows: slice  # of the drawn
    b_typical_p: Tensor


@dataclass(frozen=True, slots=True)
class TopCut:
    rows: slice  # of the drawn
    b_top_k: Tensor
    b_top_p: Tensor
    b_min_p: Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """The rows that are drawn, in the order of Cuts."""

    reqs: list[InferReq]
    rows: Tensor | None  # [drawn] int64, of the logits; None: all of them, as they are
    temperature: Tensor  # [drawn, 1] float32
    b_seed: Tensor
    top: TopCut | None
    typical: TypicalCut | None


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    reqs: list[InferReq]
    allowed: Allowed | None
    bias: Bias | None
    placed: Rows  # where what may come next depends on what came before
    penalised: Penalised | None
    drawn: Drawn | None  # the others are greedy
    asking: Rows  # for logprobs


def make_plan(reqs: list[InferReq], vocab: int, device: torch.device) -> SamplingPlan:
    rows = [(row, req) for row, req in enumerate(reqs) if not req.rules.is_plain]
    return SamplingPlan(
        reqs=list(reqs),
        allowed=_allowed([(row, req) for row, req in rows if req.rules.allowed_ids.size], vocab, device),
        bias=_bias([(row, req) for row, req in rows if req.rules.bias_ids.size], vocab, device),
        placed=[(row, req) for row, req in rows if req.rules.depend_on_place],
        penalised=_penalised([(row, req) for row, req in rows if req.sampling.has_penalty], device),
        drawn=_drawn(reqs, device),
        asking=[(row, req) for row, req in rows if req.sampling.logprobs is not None],
    )


def _allowed(rows: Rows, vocab: int, device: torch.device) -> Allowed | None:
    if not rows:
        return None
    entry_rows, token_ids, is_known = _entries([(row, req.rules.allowed_ids) for row, req in rows], vocab)
    return Allowed(
        rows=to_device([row for row, _ in rows], np.int64, device),
        entry_rows=to_device(entry_rows[is_known], np.int64, device),
        token_ids=to_device(token_ids[is_known], np.int64, device),
    )


def _bias(rows: Rows, vocab: int, device: torch.device) -> Bias | None:
    if not rows:
        return None
    entry_rows, token_ids, is_known = _entries([(row, req.rules.bias_ids) for row, req in rows], vocab)
    values = np.concatenate([req.rules.bias for _, req in rows])
    return Bias(
        entry_rows=to_device(entry_rows[is_known], np.int64, device),
        token_ids=to_device(token_ids[is_known], np.int64, device),
        values=to_device(values[is_known], np.float32, device),
    )


def _penalised(rows: Rows, device: torch.device) -> Penalised | None:
    if not rows:
        return None
    reqs = [req for _, req in rows]
    penalties = partial(
        ops.Penalties,
        to_device([row for row, _ in rows], np.int32, device),
        to_device([req.sampling.repetition_penalty for req in reqs], np.float32, device),
        to_device([req.sampling.presence_penalty for req in reqs], np.float32, device),
        to_device([req.sampling.frequency_penalty for req in reqs], np.float32, device),
        to_device([req.row for req in reqs], np.int32, device),
    )
    return Penalised(reqs, penalties)


def _drawn(batch: list[InferReq], device: torch.device) -> Drawn | None:
    by_cuts: list[list[int]] = [[] for _ in Cuts]
    for row, req in enumerate(batch):
        if req.rules.cuts is not None:
            by_cuts[req.rules.cuts].append(row)
    rows = list(chain.from_iterable(by_cuts))
    if not rows:
        return None
    reqs = [batch[row] for row in rows]
    typical_end, both_end, top_end, _ = accumulate(map(len, by_cuts))
    return Drawn(
        reqs=reqs,
        rows=None if rows == list(range(len(batch))) else to_device(rows, np.int64, device),
        temperature=to_device([req.sampling.temperature for req in reqs], np.float32, device)[:, None],
        b_seed=to_device([req.seed for req in reqs], np.int64, device),
        top=_top_cut(reqs, slice(typical_end, top_end), device),
        typical=_typical_cut(reqs, slice(both_end), device),
    )


def _top_cut(drawn: list[InferReq], rows: slice, device: torch.device) -> TopCut | None:
    cut = [req.sampling for req in drawn[rows]]
    if not cut:
        return None
    return TopCut(
        rows=rows,
        b_top_k=to_device([sampling.top_k if sampling.top_k > 0 else INT32_MAX for sampling in cut], np.int32, device),
        b_top_p=to_device([sampling.top_p for sampling in cut], np.float32, device),
        b_min_p=to_device([sampling.min_p for sampling in cut], np.float32, device),
    )


def _typical_cut(drawn: list[InferReq], rows: slice, device: torch.device) -> TypicalCut | None:
    masses = [req.sampling.typical_p for req in drawn[rows]]
    return TypicalCut(rows, to_device(masses, np.float32, device)) if masses else None


def _entries(ids_of_rows: list[tuple[int, np.ndarray]], vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, token id) pairs as two arrays, and which of them the vocabulary has."""
    token_ids = np.concatenate([ids for _, ids in ids_of_rows])
    rows = np.repeat([row for row, _ in ids_of_rows], [len(ids) for _, ids in ids_of_rows])
    return rows, token_ids, token_ids < vocab


def to_device(values: Sequence[float] | np.ndarray, dtype: type[np.generic], device: torch.device) -> Tensor:
    """Through numpy, which reads a list of numbers three times as fast as ``torch.tensor`` does."""
    return torch.from_numpy(np.array(values, dtype=dtype)).to(device, non_blocking=True)
