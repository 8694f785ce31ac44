"""Rules of requests, applied to the logits of a step in place. Rows are of the logits; ids beyond them are ignored."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.worker.sampling.plan import Allowed, Rows, allowed_of, floats, int64s


def forbid(logits: Tensor, entries: list[tuple[int, int]]) -> None:
    """Pairs of a row and a token that may not come there."""
    known = [(row, token) for row, token in entries if token < logits.shape[1]]
    rows = int64s([row for row, _ in known], logits.device)
    token_ids = int64s([token for _, token in known], logits.device)
    logits[rows, token_ids] = float("-inf")


def force(logits: Tensor, entries: list[tuple[int, int]]) -> None:
    """Pairs of a row and the token that comes there, whatever else is wanted."""
    rows = int64s([row for row, _ in entries], logits.device)
    logits.index_fill_(0, rows, float("-inf"))
    logits[rows, int64s([token for _, token in entries], logits.device)] = 0.0


def forbid_others(logits: Tensor, allowed: Allowed) -> None:
    kept = logits[allowed.entry_rows, allowed.token_ids]
    logits.index_fill_(0, allowed.rows, float("-inf"))
    logits[allowed.entry_rows, allowed.token_ids] = kept


def limit_first(logits: Tensor, beginning: Rows) -> None:
    """What the first token of an answer may be."""
    rows = [(row, req.rules.first_ids) for row, req in beginning if req.output_len == 0]
    allowed = allowed_of(rows, logits.shape[1], logits.device)
    if allowed is not None:
        forbid_others(logits, allowed)


def decay_length(logits: Tensor, decayed: Rows) -> None:
    """Raise the end tokens of answers that are longer than they should be; one that is forbidden stays so."""
    entries = [
        (row, token, req.rules.decay_at(req.output_len))
        for row, req in decayed
        for token in req.eos_ids
        if token < logits.shape[1]
    ]
    rows = int64s([row for row, _, _ in entries], logits.device)
    token_ids = int64s([token for _, token, _ in entries], logits.device)
    picked = logits[rows, token_ids]
    raised = picked + picked.abs() * floats([times for _, _, times in entries], logits.device)
    logits[rows, token_ids] = torch.where(picked.isfinite(), raised, picked)
