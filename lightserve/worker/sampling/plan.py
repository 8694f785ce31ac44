"""What the parameters of a batch's requests come to, on the device. It holds as long as the requests are the same.

Who asks for no more than a temperature and a grammar is not special: the step itself chooses that token. A feature is
in the plan only with the rows that use it, and is None (or empty) where none does.
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
from lightserve.common.device import to_device
from lightserve.io_struct import INT32_MAX
from lightserve.worker.infer_batch import InferReq
from lightserve.worker.sampling.req_rules import Cuts

Rows = list[tuple[int, InferReq]]  # rows of the logits and whose they are


@dataclass(frozen=True, slots=True)
class Constrained:
    """By grammars. Masks are in the order of ``reqs``, those of special requests first."""

    reqs: list[InferReq]
    b_mask: Tensor  # [batch] int32: the mask by which the step chooses; -1: by none
    special_rows: Tensor  # [special that are constrained] int32


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
class Watermarked:
    reqs: list[InferReq]
    rows: Tensor  # [watermarked] int32


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
    """Rows of all but ``constrained`` and ``asking`` count the special requests."""

    reqs: list[InferReq]
    special: list[InferReq]  # whose tokens the step itself does not choose
    special_rows: Tensor | None  # [special] int64, of the batch; None: all of it
    constrained: Constrained | None
    allowed: Allowed | None
    beginning: Rows  # where only some tokens may be the first
    bias: Bias | None
    watermarked: Watermarked | None
    placed: Rows  # where what may come next depends on what came before
    penalised: Penalised | None
    thinking: Rows  # where it may have to end
    decayed: Rows  # where an end becomes likelier with the length
    drawn: Drawn | None  # the others are greedy
    asking: Rows  # for logprobs; rows of the batch

    @property
    def changes_logits(self) -> bool:
        """Whatever came before, and beside what grammars allow."""
        rows = self.beginning or self.decayed
        return bool(self.allowed or self.bias or self.watermarked or self.penalised or rows)

    @property
    def needs_last_tokens(self) -> bool:
        """Whether the host has yet to learn tokens before it can say what may come next, beside what grammars allow."""
        by_tokens = [req for _, req in self.placed if req.rules.depend_on_tokens]
        limited = [req for _, req in self.thinking if req.may_be_forced]
        return any(req.is_fully_computed and req.has_token_in_flight for req in (*by_tokens, *limited))


def make_plan(reqs: list[InferReq], vocab: int, device: torch.device) -> SamplingPlan:
    special = [(row, req) for row, req in enumerate(reqs) if req.rules.is_special]
    rows = [(i, req) for i, (_, req) in enumerate(special)]
    return SamplingPlan(
        reqs=list(reqs),
        special=[req for _, req in special],
        special_rows=None if len(special) == len(reqs) else int64s([row for row, _ in special], device),
        constrained=_constrained(list(reqs), [(row, req) for row, req in rows if req.rules.has_grammar], device),
        allowed=allowed_of(
            [(row, req.rules.allowed_ids) for row, req in rows if req.rules.allowed_ids.size], vocab, device
        ),
        beginning=[(row, req) for row, req in rows if req.rules.first_ids.size],
        bias=_bias([(row, req) for row, req in rows if req.rules.bias_ids.size], vocab, device),
        watermarked=_watermarked([(row, req) for row, req in rows if req.sampling.watermark], device),
        placed=[(row, req) for row, req in rows if req.rules.depend_on_place],
        penalised=_penalised([(row, req) for row, req in rows if req.sampling.has_penalty], device),
        thinking=[(row, req) for row, req in rows if req.thinking is not None],
        decayed=[(row, req) for row, req in rows if req.rules.has_decay],
        drawn=_drawn([req for _, req in rows], device),
        asking=[(row, req) for row, req in enumerate(reqs) if req.sampling.logprobs is not None],
    )


def _constrained(batch: list[InferReq], special: Rows, device: torch.device) -> Constrained | None:
    """``special``: the rows of special requests that have a grammar."""
    plain = [row for row, req in enumerate(batch) if req.rules.has_grammar and not req.rules.is_special]
    if not (plain or special):
        return None
    b_mask = np.full(len(batch), -1)
    b_mask[plain] = len(special) + np.arange(len(plain))
    return Constrained(
        reqs=[req for _, req in special] + [batch[row] for row in plain],
        b_mask=int32s(b_mask, device),
        special_rows=int32s([row for row, _ in special], device),
    )


def allowed_of(rows: list[tuple[int, np.ndarray]], vocab: int, device: torch.device) -> Allowed | None:
    """``rows``, each with the ids that it allows; None where there are none."""
    if not rows:
        return None
    entry_rows, token_ids, is_known = _entries(rows, vocab)
    return Allowed(
        rows=int64s([row for row, _ in rows], device),
        entry_rows=int64s(entry_rows[is_known], device),
        token_ids=int64s(token_ids[is_known], device),
    )


def _bias(rows: Rows, vocab: int, device: torch.device) -> Bias | None:
    if not rows:
        return None
    entry_rows, token_ids, is_known = _entries([(row, req.rules.bias_ids) for row, req in rows], vocab)
    values = np.concatenate([req.rules.bias for _, req in rows])
    return Bias(
        entry_rows=int64s(entry_rows[is_known], device),
        token_ids=int64s(token_ids[is_known], device),
        values=floats(values[is_known], device),
    )


def _watermarked(rows: Rows, device: torch.device) -> Watermarked | None:
    return Watermarked([req for _, req in rows], int32s([row for row, _ in rows], device)) if rows else None


def _penalised(rows: Rows, device: torch.device) -> Penalised | None:
    if not rows:
        return None
    reqs = [req for _, req in rows]
    penalties = partial(
        ops.Penalties,
        int32s([row for row, _ in rows], device),
        floats([req.sampling.repetition_penalty for req in reqs], device),
        floats([req.sampling.presence_penalty for req in reqs], device),
        floats([req.sampling.frequency_penalty for req in reqs], device),
        int32s([req.row for req in reqs], device),
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
        rows=None if rows == list(range(len(batch))) else int64s(rows, device),
        temperature=floats([req.sampling.temperature for req in reqs], device)[:, None],
        b_seed=int64s([req.seed for req in reqs], device),
        top=_top_cut(reqs, slice(typical_end, top_end), device),
        typical=_typical_cut(reqs, slice(both_end), device),
    )


def _top_cut(drawn: list[InferReq], rows: slice, device: torch.device) -> TopCut | None:
    cut = [req.sampling for req in drawn[rows]]
    if not cut:
        return None
    return TopCut(
        rows=rows,
        b_top_k=int32s([sampling.top_k if sampling.top_k > 0 else INT32_MAX for sampling in cut], device),
        b_top_p=floats([sampling.top_p for sampling in cut], device),
        b_min_p=floats([sampling.min_p for sampling in cut], device),
    )


def _typical_cut(drawn: list[InferReq], rows: slice, device: torch.device) -> TypicalCut | None:
    masses = [req.sampling.typical_p for req in drawn[rows]]
    return TypicalCut(rows, floats(masses, device)) if masses else None


def _entries(ids_of_rows: list[tuple[int, np.ndarray]], vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, token id) pairs as two arrays, and which of them the vocabulary has."""
    token_ids = np.concatenate([ids for _, ids in ids_of_rows])
    rows = np.repeat([row for row, _ in ids_of_rows], [len(ids) for _, ids in ids_of_rows])
    return rows, token_ids, token_ids < vocab


def int64s(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def int32s(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int32), device)


def floats(values: Sequence[float] | np.ndarray, device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.float32), device)
