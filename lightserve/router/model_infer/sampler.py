"""Logits to tokens for a batch of requests, each with its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.io_struct import SamplingParams
from lightserve.router.model_infer.infer_batch import InferReq


@torch.inference_mode()
def sample(logits: Tensor, reqs: Sequence[InferReq]) -> Tensor:
    """A token for each row of ``logits``, ``[batch]``."""
    changed = logits
    if any(_is_changed(req) for req in reqs):
        changed = logits.clone()
        _forbid_early_end(changed, reqs)
        _penalise(changed, reqs)
    tokens = ops.argmax(changed)
    random_rows = [i for i, req in enumerate(reqs) if not req.sampling.is_greedy]
    if random_rows:
        rows = torch.tensor(random_rows, device=logits.device)
        tokens[rows] = _draw(changed[rows], [reqs[i] for i in random_rows])
    return tokens


@torch.inference_mode()
def logprobs_of(tokens: Tensor, logits: Tensor, reqs: Sequence[InferReq]) -> list[float | None]:
    """The log-probability of each token where its request asked: before penalties, temperature and cuts."""
    asked = [i for i, req in enumerate(reqs) if req.sampling.logprobs]
    found: list[float | None] = [None] * len(reqs)
    if asked:
        rows = torch.tensor(asked, device=logits.device)
        picked = logits[rows].log_softmax(-1).gather(1, tokens[rows, None])
        for i, logprob in zip(asked, picked[:, 0].tolist(), strict=True):
            found[i] = logprob
    return found


def _is_changed(req: InferReq) -> bool:
    return req.sampling.has_penalty or req.output_len < req.sampling.min_new_tokens


def _forbid_early_end(logits: Tensor, reqs: Sequence[InferReq]) -> None:
    for i, req in enumerate(reqs):
        ends = (*req.eos_ids, *req.sampling.stop_token_ids)
        if req.output_len < req.sampling.min_new_tokens and ends:
            logits[i, list(ends)] = float("-inf")


def _penalise(logits: Tensor, reqs: Sequence[InferReq]) -> None:
    rows: list[int] = []
    token_ids: list[int] = []
    counts: list[int] = []
    for i, req in enumerate(reqs):
        if req.sampling.has_penalty:
            seen = set(req.token_ids)
            rows += [i] * len(seen)
            token_ids += seen
            counts += [req.output_counts[token] for token in seen]
    if not rows:
        return
    device = logits.device
    penalties = ops.Penalties(
        b_repetition=_column(reqs, lambda s: s.repetition_penalty, device),
        b_presence=_column(reqs, lambda s: s.presence_penalty, device),
        b_frequency=_column(reqs, lambda s: s.frequency_penalty, device),
        rows=torch.tensor(rows, dtype=torch.int32, device=device),
        token_ids=torch.tensor(token_ids, dtype=torch.int32, device=device),
        output_counts=torch.tensor(counts, dtype=torch.int32, device=device),
    )
    ops.apply_penalties(logits, penalties)


def _draw(logits: Tensor, reqs: Sequence[InferReq]) -> Tensor:
    device, vocab = logits.device, logits.shape[1]
    logits = logits / _column(reqs, lambda s: s.temperature, device)[:, None]
    if any(r.sampling.top_k > 0 or r.sampling.top_p < 1 or r.sampling.min_p > 0 for r in reqs):
        top_k = torch.tensor([r.sampling.top_k if r.sampling.top_k > 0 else vocab for r in reqs], dtype=torch.int32)
        top_p = _column(reqs, lambda s: s.top_p, device)
        ops.cut_logits(logits, top_k.to(device), top_p, _column(reqs, lambda s: s.min_p, device))
    seeds = torch.tensor([r.seed for r in reqs], device=device)
    positions = torch.tensor([len(r.token_ids) for r in reqs], dtype=torch.int32, device=device)
    return ops.sample(logits, seeds, positions)


def _column(reqs: Sequence[InferReq], pick: Callable[[SamplingParams], float], device: torch.device) -> Tensor:
    return torch.tensor([pick(req.sampling) for req in reqs], dtype=torch.float32, device=device)
