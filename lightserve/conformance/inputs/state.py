"""Inputs of ops with recurrent state. Rows of states that no request reads are NaN, and so is all beside the heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops
from lightserve.conformance.inputs.tensors import NAN, ints, randn

NO_ROW = ops.NO_ROW
# tokens, the row that it reads, the row that it writes, and perhaps the row of a snapshot and the tokens before that
Request = tuple[int, ...]
# New and old ones, in the same row and in another, one whose state is not kept, and two that continue from one row.
MIXED: list[Request] = [(70, NO_ROW, 3), (1, 1, 1), (33, 0, 0), (5, 6, 4), (2, 6, NO_ROW), (32, NO_ROW, 2), (1, 6, 7)]
DECODES: list[Request] = [(1, 2, 2), (1, NO_ROW, 4), (1, 0, 1), (1, 6, NO_ROW)]
# at an end of chunks or not, of a request with few tokens, beside one that has none, whose state is not kept
SNAPSHOTS: list[Request] = [
    (70, NO_ROW, 3, 5, 69),
    (1, 1, 1),
    (33, 0, 0, 8, 20),
    (5, 6, 4, 7, 1),
    (2, 6, NO_ROW, 2, 1),
    (40, 6, 9, 10, 32),
    (3, NO_ROW, 11, 12, 2),
]
ROWS = 9


def state_batch(requests: list[Request], device: str) -> ops.StateBatch:
    lens = [tokens for tokens, *_ in requests]
    snapshots = [request[3:] or (NO_ROW, 0) for request in requests]
    columns = [ints([snapshot[i] for snapshot in snapshots], device) for i in range(2)]
    return ops.StateBatch(
        b1_start=ints([sum(lens[:i]) for i in range(len(lens) + 1)], device),
        b_read_row=ints([read for _, read, *_ in requests], device),
        b_write_row=ints([write for _, _, write, *_ in requests], device),
        max_tokens=max(lens, default=1),
        snapshots=ops.Snapshots(*columns) if any(request[3:] for request in requests) else None,
    )


def count_tokens(requests: list[Request]) -> int:
    return sum(tokens for tokens, *_ in requests)


def states_for(requests: list[Request], *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """A layer of a bigger tensor."""
    rows = max([ROWS, *(max(request[1:4]) + 1 for request in requests)])
    states = torch.full((rows, 2, *shape), NAN, dtype=dtype, device=device)[:, 1]
    for row in {read for _, read, *_ in requests} - {NO_ROW}:
        states[row] = randn(*shape, dtype=dtype, device=device, seed=100 + row)
    return states


def side_by_side(*tensors: Tensor) -> list[Tensor]:
    """The same values as parts of one fused tensor, between NaN."""
    tokens = len(tensors[0])
    flat = [tensor.reshape(tokens, tensor[0].numel() if tokens else tensor.shape[1:].numel()) for tensor in tensors]
    nan = flat[0].new_full((tokens, 8), NAN)
    fused = torch.cat([piece for tensor in flat for piece in (tensor, nan)], dim=1)
    views, first = [], 0
    for tensor, piece in zip(tensors, flat, strict=True):
        views.append(fused[:, first : first + piece.shape[1]].view(tensor.shape))
        first += piece.shape[1] + 8
    return views


def conv_args(
    requests: list[Request], channels: int, dtype: torch.dtype, device: str, width: int = 4
) -> tuple[Tensor, ops.ConvParams, Tensor, ops.StateBatch]:
    (x,) = side_by_side(randn(count_tokens(requests), channels, dtype=dtype, device=device))
    weight = randn(channels, width, dtype=dtype, device=device, seed=1) / width
    params = ops.ConvParams(weight, randn(channels, dtype=dtype, device=device, seed=2))
    states = states_for(requests, width - 1, channels, dtype=dtype, device=device)
    return x, params, states, state_batch(requests, device)


DeltaShape = tuple[int, int, int, int]  # heads of keys and of values, sizes of a key and of a value
SMALL_DELTA: DeltaShape = (2, 4, 24, 40)


def delta_args(
    requests: list[Request], shape: DeltaShape, dtype: torch.dtype, device: str, by_channel: bool = False
) -> tuple[ops.DeltaInputs, Tensor, ops.StateBatch]:
    k_heads, heads, k_dim, v_dim = shape
    tokens = count_tokens(requests)
    q, k = (randn(tokens, k_heads, k_dim, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    v = randn(tokens, heads, v_dim, dtype=dtype, device=device, seed=2)
    decays = (tokens, heads, k_dim) if by_channel else (tokens, heads)
    log_decay = -F.softplus(randn(*decays, device=device, seed=3) - 2)
    q, k, v = side_by_side(q, k, v)
    inputs = ops.DeltaInputs(q, k, v, log_decay, randn(tokens, heads, device=device, seed=4).sigmoid())
    return inputs, states_for(requests, heads, v_dim, k_dim, device=device), state_batch(requests, device)


MambaShape = tuple[int, int, int, int]  # groups, heads, sizes of a head and of the state
SMALL_MAMBA: MambaShape = (2, 6, 20, 48)


def mamba_args(
    requests: list[Request], shape: MambaShape, dtype: torch.dtype, device: str
) -> tuple[ops.MambaInputs, ops.MambaParams, Tensor, ops.StateBatch]:
    groups, heads, dim, state_dim = shape
    tokens = count_tokens(requests)
    x = randn(tokens, heads, dim, dtype=dtype, device=device)
    b, c = (
        randn(tokens, groups, state_dim, device=device, seed=seed).mul(state_dim**-0.5).to(dtype) for seed in (1, 2)
    )
    dt = randn(tokens, heads, dtype=dtype, device=device, seed=3)
    x, b, c, dt = side_by_side(x, b, c, dt)
    a = -torch.linspace(0.2, 4.0, heads, device=device)
    dt_bias, d = (randn(heads, device=device, seed=seed) - 1 for seed in (4, 5))
    inputs, params = ops.MambaInputs(x, dt, b, c), ops.MambaParams(a, dt_bias, d)
    return inputs, params, states_for(requests, heads, dim, state_dim, device=device), state_batch(requests, device)


def _few(tokens: int) -> list[Request]:
    """Requests of 7 tokens and fewer."""
    return [(min(7, tokens - first), i, i) for i, first in enumerate(range(0, tokens, 7))]


def _conv_args(tokens: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    return conv_args(_few(tokens), 48, dtype, device)


def _delta_args(tokens: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    return delta_args(_few(tokens), SMALL_DELTA, dtype, device)


def _mamba_args(tokens: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    return mamba_args(_few(tokens), SMALL_MAMBA, dtype, device)


def delta_gates_args(tokens: int, heads: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """``width``: columns of a head."""
    a, b = randn(tokens, heads * width, dtype=dtype, device=device), randn(tokens, heads, dtype=dtype, device=device)
    a, b = side_by_side(a, b)
    rates, dt_bias = (randn(size, device=device, seed=size) for size in (heads, heads * width))
    return a, b, -rates.exp(), dt_bias


def _delta_gates_args(tokens: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    return delta_gates_args(tokens, 6, 1, dtype, device)


STATE_ARGS = {
    "delta_gates": _delta_gates_args,
    "causal_conv1d": _conv_args,
    "gated_delta_rule": _delta_args,
    "mamba_scan": _mamba_args,
}
