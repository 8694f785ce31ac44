"""The rules of requests that change logits, as tensors for a whole batch.

Rules are applied to a copy of the logits, in the order that SamplingParams documents. Token ids beyond the vocabulary
are ignored. A rule is here only with the rows that use it, and is None or empty if no row does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import to_device
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.step_masks import StepMasks
from lightserve.worker.sampling.token_history import Entries, SeenTokens, TokenHistory

Rows = list[tuple[int, InferReq]]  # rows of the logits, and their requests


@dataclass(frozen=True, slots=True)
class Allowed:
    """In ``rows``, only the tokens of the entries are allowed."""

    rows: Tensor  # [restricted] int64
    entry_rows: Tensor  # [entries] int64
    token_ids: Tensor  # [entries] int64


@dataclass(frozen=True, slots=True)
class Bias:
    entry_rows: Tensor  # [entries] int64
    token_ids: Tensor  # [entries] int64, each once per row
    values: Tensor  # [entries] float32


@dataclass(frozen=True, slots=True)
class Watermarked:
    reqs: list[InferReq]
    rows: Tensor  # [watermarked] int32


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """Rows after the same number of drafts."""

    last_drafts: Entries  # the last of these drafts, of each row
    penalties: Callable[[Tensor], ops.Penalties]  # takes the table of SeenTokens


@dataclass(frozen=True, slots=True)
class Penalised:
    reqs: list[InferReq]  # without drafts
    rows: list[PenalisedRows]  # without drafts, after one draft, after two

    def apply(self, logits: Tensor, seen: SeenTokens) -> None:
        """The table of ``seen`` has the drafts before each row while this is applied to it."""
        for rows in self.rows:
            seen.add(rows.last_drafts)
            ops.apply_penalties(logits, rows.penalties(seen.table))
        seen.add([entry for rows in self.rows for entry in rows.last_drafts], times=-1)


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Rows count the requests with rules, not all requests of the batch."""

    allowed: Allowed | None
    first_allowed: Rows  # only some tokens may be the first of the output
    bias: Bias | None
    watermarked: Watermarked | None
    forbidding: Rows  # the tokens so far decide which tokens are forbidden
    penalised: Penalised | None
    length_decay: Rows  # end tokens become more likely with the length
    thinking: Rows  # thinking may have to end

    @classmethod
    def of(cls, rows: Rows, vocab: int, device: torch.device) -> LogitRules:
        return cls(
            allowed=_allowed(
                [(row, req.rules.allowed_ids) for row, req in rows if req.rules.allowed_ids.size], vocab, device
            ),
            first_allowed=[(row, req) for row, req in rows if req.rules.first_ids.size],
            bias=_bias([(row, req) for row, req in rows if req.rules.bias_ids.size], vocab, device),
            watermarked=_watermarked([(row, req) for row, req in rows if req.sampling.watermark], device),
            forbidding=[(row, req) for row, req in rows if req.rules.may_forbid],
            penalised=_penalised([(row, req) for row, req in rows if req.sampling.has_penalty], device),
            length_decay=[(row, req) for row, req in rows if req.rules.has_length_decay],
            thinking=[(row, req) for row, req in rows if req.thinking is not None],
        )

    @property
    def need_tokens_in_flight(self) -> bool:
        """Whether a rule depends on a token that is still in flight. Grammars are not counted."""
        by_tokens = [req for _, req in self.forbidding if req.rules.forbid_by_tokens]
        limited = [req for _, req in self.thinking if req.may_be_forced]
        return any(req.is_fully_computed and req.has_token_in_flight for req in (*by_tokens, *limited))

    @property
    def _change_every_step(self) -> bool:
        """Whether a rule changes logits in every step, whatever the tokens so far are."""
        rows = self.first_allowed or self.length_decay
        return bool(self.allowed or self.bias or self.watermarked or self.penalised or rows)

    def record(self, history: TokenHistory) -> None:
        """Record the tokens so far that rules depend on."""
        if self.watermarked is not None:
            history.record_last(self.watermarked.reqs)
        if self.penalised is not None:
            history.count(self.penalised.reqs)

    def apply(self, logits: Tensor, masks: StepMasks | None, history: TokenHistory, in_place: bool) -> Tensor:
        """The logits after all rules, in float32; ``logits`` itself if no rule applies. A copy, unless ``in_place``."""
        forbidden = [(row, token) for row, req in self.forbidding for token in req.forbidden_next()]
        forced = [(row, token) for row, req in self.thinking if (token := req.forced_next()) is not None]
        if not (forbidden or forced or masks or self._change_every_step):
            return logits
        logits = logits.to(torch.float32, copy=not in_place)
        if masks:
            masks.apply(logits)
        if self.allowed:
            _forbid_others(logits, self.allowed)
        _forbid_first(logits, self.first_allowed)
        if self.bias:
            logits[self.bias.entry_rows, self.bias.token_ids] += self.bias.values
        if self.watermarked and history.last_tokens is not None:
            ops.add_watermark(logits, self.watermarked.rows, history.last_tokens)
        if forbidden:
            _forbid(logits, forbidden)
        if self.penalised and history.seen is not None:
            self.penalised.apply(logits, history.seen)
        if self.length_decay:
            _raise_ends(logits, self.length_decay)
        if forced:
            _force(logits, forced)
        return logits


def _allowed(rows: list[tuple[int, np.ndarray]], vocab: int, device: torch.device) -> Allowed | None:
    """``rows``: each with the ids that it allows."""
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
    most = max(len(req.draft_ids) for _, req in rows)
    by_drafts = [[(row, req) for row, req in rows if len(req.draft_ids) == count] for count in range(most + 1)]
    return Penalised([req for _, req in by_drafts[0]], [_penalised_rows(rows, device) for rows in by_drafts])


def _penalised_rows(rows: Rows, device: torch.device) -> PenalisedRows:
    reqs = [req for _, req in rows]
    penalties = partial(
        ops.Penalties,
        int32s([row for row, _ in rows], device),
        floats([req.sampling.repetition_penalty for req in reqs], device),
        floats([req.sampling.presence_penalty for req in reqs], device),
        floats([req.sampling.frequency_penalty for req in reqs], device),
        int32s([req.row for req in reqs], device),
    )
    last_drafts = [(req.row, req.draft_ids[-1]) for req in reqs if req.draft_ids]
    return PenalisedRows(last_drafts, penalties)


def _entries(ids_of_rows: list[tuple[int, np.ndarray]], vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, token id) pairs as two arrays, and which of them the vocabulary has."""
    token_ids = np.concatenate([ids for _, ids in ids_of_rows])
    rows = np.repeat([row for row, _ in ids_of_rows], [len(ids) for _, ids in ids_of_rows])
    return rows, token_ids, token_ids < vocab


def _forbid(logits: Tensor, entries: list[tuple[int, int]]) -> None:
    """``entries``: a row, and a token that is forbidden there."""
    known = [(row, token) for row, token in entries if token < logits.shape[1]]
    rows = int64s([row for row, _ in known], logits.device)
    logits[rows, int64s([token for _, token in known], logits.device)] = float("-inf")


def _force(logits: Tensor, entries: list[tuple[int, int]]) -> None:
    """``entries``: a row, and the token that is forced there, against all other rules."""
    rows = int64s([row for row, _ in entries], logits.device)
    logits.index_fill_(0, rows, float("-inf"))
    logits[rows, int64s([token for _, token in entries], logits.device)] = 0.0


def _forbid_others(logits: Tensor, allowed: Allowed) -> None:
    allowed_logits = logits[allowed.entry_rows, allowed.token_ids]
    logits.index_fill_(0, allowed.rows, float("-inf"))
    logits[allowed.entry_rows, allowed.token_ids] = allowed_logits


def _forbid_first(logits: Tensor, first_allowed: Rows) -> None:
    """Apply ``first_allowed_token_ids`` to requests without output."""
    rows = [(row, req.rules.first_ids) for row, req in first_allowed if req.output_len == 0]
    allowed = _allowed(rows, logits.shape[1], logits.device)
    if allowed is not None:
        _forbid_others(logits, allowed)


def _raise_ends(logits: Tensor, length_decay: Rows) -> None:
    """Apply ``exponential_decay_length_penalty``. A forbidden end token stays forbidden."""
    entries = [
        (row, token, req.rules.length_decay_at(req.output_len))
        for row, req in length_decay
        for token in req.eos_ids
        if token < logits.shape[1]
    ]
    rows = int64s([row for row, _, _ in entries], logits.device)
    token_ids = int64s([token for _, token, _ in entries], logits.device)
    picked = logits[rows, token_ids]
    raised = picked + picked.abs() * floats([times for _, _, times in entries], logits.device)
    logits[rows, token_ids] = torch.where(picked.isfinite(), raised, picked)


def int64s(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def int32s(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int32), device)


def floats(values: Sequence[float] | np.ndarray, device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.float32), device)
