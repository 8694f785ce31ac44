"""Chunks of the requests of a step, listed on the device: the host does not know how long each request is."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous

REQUEST = tl.constexpr(0)  # fields of a chunk: its request, or -1 for an entry that is not used
FIRST_TOKEN = tl.constexpr(1)
CHUNK_FIELDS = tl.constexpr(2)


class ChunkSpec(NamedTuple):
    tokens: int  # of a chunk
    min_tokens: int = 1  # of a request; shorter ones have no chunks


def chunks_of(batch: ops.StateBatch, tokens: int, spec: ChunkSpec) -> Tensor:
    """``[entries, CHUNK_FIELDS]`` int32; the same list for all layers of a step."""
    if spec not in batch.plans:
        batch.plans[spec] = _list_chunks(batch.b1_start, tokens, spec)
    chunks: Tensor = batch.plans[spec]
    return chunks


def _list_chunks(starts: Tensor, tokens: int, spec: ChunkSpec) -> Tensor:
    lens = starts.diff()
    counts = torch.where(lens < spec.min_tokens, 0, (lens + spec.tokens - 1) // spec.tokens)
    ends = counts.cumsum(0)
    # At most so many, whatever the lengths are: the size of a launch depends on nothing else.
    most = tokens if spec.tokens == 1 else tokens // spec.tokens + len(lens)
    entries = torch.arange(most, device=starts.device)
    request = torch.searchsorted(ends, entries, right=True)
    is_used = request < len(lens)
    request = torch.where(is_used, request, 0)
    first = starts[request] + (entries - ends[request] + counts[request]) * spec.tokens
    return torch.stack((torch.where(is_used, request, -1), first), dim=1).to(torch.int32)


def check_batch(op: str, batch: ops.StateBatch) -> None:
    check_last_contiguous(op, b1_start=batch.b1_start, b_read_row=batch.b_read_row, b_write_row=batch.b_write_row)


@triton.jit
def load_request(starts_ptr, read_rows_ptr, write_rows_ptr, request):
    """Its first token, its end, and the rows of its state, in 64 bits: strides multiply them."""
    start = tl.load(starts_ptr + request).to(tl.int64)
    end = tl.load(starts_ptr + request + 1).to(tl.int64)
    return start, end, tl.load(read_rows_ptr + request).to(tl.int64), tl.load(write_rows_ptr + request).to(tl.int64)
