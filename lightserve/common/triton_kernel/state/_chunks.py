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
END = tl.constexpr(2)
CHUNK_FIELDS = tl.constexpr(3)


class ChunkSpec(NamedTuple):
    tokens: int  # of a chunk
    min_tokens: int = 1  # of a request; shorter ones have no chunks
    ends_at_snapshots: bool = False  # no chunk has tokens before and after one


def chunks_of(batch: ops.StateBatch, tokens: int, spec: ChunkSpec) -> Tensor:
    """``[entries, CHUNK_FIELDS]`` int32; the same list for all layers of a step."""
    if spec not in batch.plans:
        batch.plans[spec] = _list_chunks(batch, tokens, spec)
    chunks: Tensor = batch.plans[spec]
    return chunks


def _list_chunks(batch: ops.StateBatch, tokens: int, spec: ChunkSpec) -> Tensor:
    starts, ends, requests = _parts(batch, spec)
    counts = torch.where(batch.b1_start.diff()[requests] < spec.min_tokens, 0, -((starts - ends) // spec.tokens))
    last = counts.cumsum(0)
    # At most so many, whatever the lengths are: the size of a launch depends on nothing else.
    most = tokens if spec.tokens == 1 else tokens // spec.tokens + len(counts)
    entries = torch.arange(most, device=starts.device)
    number = torch.searchsorted(last, entries, right=True)
    is_used = number < len(counts)
    number = torch.where(is_used, number, 0)
    first = starts[number] + (entries - last[number] + counts[number]) * spec.tokens
    fields = (torch.where(is_used, requests[number], -1), first, ends[number])
    return torch.stack(fields, dim=1).to(torch.int32)


def _parts(batch: ops.StateBatch, spec: ChunkSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Beginnings, ends and requests of what chunks are cut from: requests, or what is before and after snapshots."""
    starts, ends = batch.b1_start[:-1], batch.b1_start[1:]
    requests = torch.arange(len(starts), device=starts.device)
    if not spec.ends_at_snapshots or batch.snapshots is None:
        return starts, ends, requests
    middle = torch.where(batch.snapshots.rows >= 0, starts + batch.snapshots.lens, ends)
    pairs = (torch.stack(pair, dim=1).flatten() for pair in ((starts, middle), (middle, ends), (requests, requests)))
    starts, ends, requests = pairs
    return starts, ends, requests


def check_batch(op: str, batch: ops.StateBatch) -> None:
    check_last_contiguous(op, b1_start=batch.b1_start, b_read_row=batch.b_read_row, b_write_row=batch.b_write_row)
    if batch.snapshots is not None:
        check_last_contiguous(op, snapshot_rows=batch.snapshots.rows, snapshot_lens=batch.snapshots.lens)


@triton.jit
def load_request(starts_ptr, read_rows_ptr, write_rows_ptr, request):
    """Its first token, its end, and the rows of its state, in 64 bits: strides multiply them."""
    start = tl.load(starts_ptr + request).to(tl.int64)
    end = tl.load(starts_ptr + request + 1).to(tl.int64)
    return start, end, tl.load(read_rows_ptr + request).to(tl.int64), tl.load(write_rows_ptr + request).to(tl.int64)


@triton.jit
def load_snapshot(rows_ptr, lens_ptr, request, start, end):
    """The row of its snapshot, and the first token behind that; without one a negative row, and its end."""
    row = tl.full((), -1, tl.int64)
    after = end
    if rows_ptr is not None:
        row = tl.load(rows_ptr + request).to(tl.int64)
        after = tl.where(row >= 0, start + tl.load(lens_ptr + request), end)
    return row, after
