"""The recurrence behind Gated DeltaNet, Kimi Delta Attention and Mamba2.

The state of a head is a matrix that maps keys to values. A token lets it decay, adds its own pair of key and value, and
reads what the matrix has for its query. With ``corrects`` it adds only what the matrix does not yet return for the key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightserve.common.ops.state.batch import StateBatch, read_state, write_state

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LinearScan:
    """Inputs of a recurrence. Neighbouring heads share a key: there are ``heads / k_heads`` of them."""

    q: Tensor  # [tokens, k_heads, k_dim]
    k: Tensor  # [tokens, k_heads, k_dim]
    v: Tensor  # [tokens, heads, v_dim]
    log_decay: Tensor  # [tokens, heads] or, by channel of the keys, [tokens, heads, k_dim]; float32, at most 0
    beta: Tensor  # [tokens, heads] float32: the factor of what a token adds
    scale: float = 1.0  # of the queries
    has_norm: bool = False  # queries and keys are divided by their length
    corrects: bool = False
    skip: Tensor | None = None  # [heads] float32: the factor of the value in the result

    @property
    def decays_by_channel(self) -> bool:
        return self.log_decay.dim() == 3


def queries_and_keys(scan: LinearScan, tokens: slice) -> tuple[Tensor, Tensor]:
    """In float32, scaled, for each head ``[tokens, heads, k_dim]``."""
    q, k = (x[tokens].float() for x in (scan.q, scan.k))
    if scan.has_norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    heads_per_key = scan.v.shape[1] // scan.k.shape[1]
    return (q * scan.scale).repeat_interleave(heads_per_key, 1), k.repeat_interleave(heads_per_key, 1)


def decays(scan: LinearScan, tokens: slice) -> Tensor:
    """The log of the decay, ``[tokens, heads, 1 or k_dim]``."""
    log_decay = scan.log_decay[tokens].float()
    return log_decay if scan.decays_by_channel else log_decay[..., None]


def scan_by_token(scan: LinearScan, states: Tensor, batch: StateBatch) -> Tensor:
    """The definition. ``states`` ``[rows, heads, v_dim, k_dim]``; the result is like ``v``.

    Computed in float32: states in bfloat16 are rounded where a step, or the part before a snapshot, ends.
    """
    out = scan.v.new_empty(scan.v.shape)
    for tokens, read, write in batch.requests():
        state = read_state(states, read).float()
        columns = (*queries_and_keys(scan, tokens), scan.v[tokens].float(), decays(scan, tokens), scan.beta[tokens])
        for token, (q, k, v, log_decay, beta) in enumerate(zip(*columns, strict=True), tokens.start):
            state = state * log_decay.exp()[:, None]
            added = v - torch.einsum("hvk,hk->hv", state, k) if scan.corrects else v
            state = state + (beta.float()[:, None] * added)[..., None] * k[:, None]
            result = torch.einsum("hvk,hk->hv", state, q)
            out[token] = result if scan.skip is None else result + scan.skip.float()[:, None] * v
        write_state(states, write, state)
    return out
