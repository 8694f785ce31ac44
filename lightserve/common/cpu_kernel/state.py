"""Ops with recurrent state in matrix products: a chunk of a prompt at a time, and all decodes of a step at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.common.ops.state.batch import read_state, write_state
from lightserve.common.ops.state.linear_scan import LinearScan, decays, queries_and_keys

CHUNK = 64  # tokens
CHANNEL_CHUNK = 16  # with a decay for each channel, which makes a matrix for each pair of tokens


@ops.causal_conv1d.impl("cpu")
def causal_conv1d(x: Tensor, params: ops.ConvParams, states: Tensor, batch: ops.StateBatch) -> Tensor:
    if batch.max_tokens == 1 and len(batch.b_read_row) == len(x):
        return _convolve_decodes(x, params, states, batch)
    out = x.new_empty(x.shape)
    weight = params.weight.float()[:, None]
    for tokens, read, write in batch.requests():
        inputs = torch.cat((read_state(states, read).to(x.dtype), x[tokens]))
        sums = F.conv1d(inputs.float().T[None], weight, groups=x.shape[1])[0].T
        out[tokens] = params.finish(sums).to(x.dtype)
        write_state(states, write, inputs[len(inputs) - params.width + 1 :])
    return out


def _convolve_decodes(x: Tensor, params: ops.ConvParams, states: Tensor, batch: ops.StateBatch) -> Tensor:
    inputs = torch.cat((_gather(states, batch.b_read_row).to(x.dtype), x[:, None]), dim=1)
    _scatter(states, batch.b_write_row, inputs[:, 1:])
    return params.finish((inputs.float() * params.weight.float().T).sum(1)).to(x.dtype)


@ops.gated_delta_rule.impl("cpu")
def gated_delta_rule(inputs: ops.DeltaInputs, states: Tensor, batch: ops.StateBatch) -> Tensor:
    return _scan(inputs.scan(), states, batch)


@ops.mamba_scan.impl("cpu")
def mamba_scan(inputs: ops.MambaInputs, params: ops.MambaParams, states: Tensor, batch: ops.StateBatch) -> Tensor:
    return _scan(inputs.scan(*params.steps(inputs.dt), params.d), states, batch)


def _scan(scan: LinearScan, states: Tensor, batch: ops.StateBatch) -> Tensor:
    if batch.max_tokens == 1 and len(batch.b_read_row) == len(scan.v):
        out = _scan_decodes(scan, states, batch)
    else:
        out = torch.empty(scan.v.shape, dtype=torch.float32, device=scan.v.device)
        for tokens, read, write in batch.requests():
            out[tokens], state = _scan_request(scan, tokens, read_state(states, read))
            write_state(states, write, state)
    if scan.skip is not None:
        out += scan.skip.float()[:, None] * scan.v
    return out.to(scan.v.dtype)


def _scan_decodes(scan: LinearScan, states: Tensor, batch: ops.StateBatch) -> Tensor:
    every = slice(None)
    q, k = queries_and_keys(scan, every)
    state = _gather(states, batch.b_read_row).mul_(decays(scan, every).exp()[..., None, :])
    added = scan.v.float()
    if scan.corrects:
        added = added - (state @ k[..., None])[..., 0]
    state += (added * scan.beta[..., None])[..., None] * k[..., None, :]
    _scatter(states, batch.b_write_row, state)
    return (state @ q[..., None])[..., 0]


def _scan_request(scan: LinearScan, tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
    """The results ``[tokens, heads, v_dim]`` in float32, and the state behind them."""
    columns = (
        *queries_and_keys(scan, tokens),
        scan.v[tokens].float(),
        decays(scan, tokens),
        scan.beta[tokens, :, None],
    )
    size = CHANNEL_CHUNK if scan.decays_by_channel else CHUNK
    by_head = [torch.split_with_sizes(column.transpose(0, 1), _chunk_sizes(column, size), 1) for column in columns]
    outs = []
    for q, k, v, log_decay, beta in zip(*by_head, strict=True):
        decay = log_decay.cumsum(1)
        scores, overlaps = _products(q, k, decay)
        added = beta * v
        if scan.corrects:
            added -= beta * ((k * decay.exp()) @ state.mT)
            # Only what is below the diagonal is read: the diagonal counts as 1.
            added = torch.linalg.solve_triangular(beta * overlaps, added, upper=False, unitriangular=True)
        outs.append((q * decay.exp()) @ state.mT + scores.tril() @ added)
        whole_decay = decay[:, -1:]
        state = state * whole_decay.exp() + added.mT @ (k * (whole_decay - decay).exp())
    return torch.cat(outs, 1).transpose(0, 1), state


def _chunk_sizes(column: Tensor, size: int) -> list[int]:
    return [min(size, len(column) - first) for first in range(0, len(column), size)]


def _products(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """``q k^T`` and ``k k^T``, each product times the decay from the token of the column to that of the row."""
    factor = (decay[:, :, None] - decay[:, None]).clamp_(max=0).exp_()  # past the diagonal it could be infinite
    if factor.shape[-1] == 1:
        return (q @ k.mT) * factor[..., 0], (k @ k.mT) * factor[..., 0]
    keys = factor.mul_(k[:, None])
    return (keys @ q[..., None])[..., 0], (keys @ k[..., None])[..., 0]


def _gather(states: Tensor, rows: Tensor) -> Tensor:
    """A copy of these rows; zeros for ``NO_ROW``."""
    gathered = states[rows.clamp(min=0).long()]
    gathered[rows < 0] = 0
    return gathered


def _scatter(states: Tensor, rows: Tensor, new: Tensor) -> None:
    is_kept = rows >= 0
    states[rows[is_kept].long()] = new[is_kept].to(states.dtype)
