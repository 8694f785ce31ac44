"""Inputs of ops with recurrent state. Rows of states that no request reads are NaN, and so is all beside the heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from test.ops.tensors import NAN, ints, randn

NO_ROW = ops.NO_ROW
Request = tuple[int, int, int]  # tokens, the row that it reads, the row that it writes
# New and old ones, in the same row and in another, one whose state is not kept, and two that continue from one row.
MIXED: list[Request] = [(70, NO_ROW, 3), (1, 1, 1), (33, 0, 0), (5, 6, 4), (2, 6, NO_ROW), (32, NO_ROW, 2), (1, 6, 7)]
DECODES: list[Request] = [(1, 2, 2), (1, NO_ROW, 4), (1, 0, 1), (1, 6, NO_ROW)]
ROWS = 9


def state_batch(requests: list[Request], device: str) -> ops.StateBatch:
    lens = [tokens for tokens, _, _ in requests]
    return ops.StateBatch(
        b1_start=ints([sum(lens[:i]) for i in range(len(lens) + 1)], device),
        b_read_row=ints([read for _, read, _ in requests], device),
        b_write_row=ints([write for _, _, write in requests], device),
        max_tokens=max(lens, default=1),
    )


def count_tokens(requests: list[Request]) -> int:
    return sum(tokens for tokens, _, _ in requests)


def states_for(requests: list[Request], *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """A layer of a bigger tensor."""
    rows = max([ROWS, *(max(read, write) + 1 for _, read, write in requests)])
    states = torch.full((rows, 2, *shape), NAN, dtype=dtype, device=device)[:, 1]
    for row in {read for _, read, _ in requests} - {NO_ROW}:
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


def _few(tokens: int) -> list[Request]:
    """Requests of 7 tokens and fewer."""
    return [(min(7, tokens - first), i, i) for i, first in enumerate(range(0, tokens, 7))]


def _conv_args(tokens: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    return conv_args(_few(tokens), 48, dtype, device)


STATE_ARGS = {
    "causal_conv1d": _conv_args,
}
