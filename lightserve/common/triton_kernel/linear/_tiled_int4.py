"""4-bit weights in the order in which tensor cores take them.

A tile has the codes of 16 rows of a group. Where q is the lane of a thread modulo 4 and r its lane // 4, it multiplies
the numbers 2q, 2q + 1, 2q + 8 and 2q + 9 of each 16 of the rows r and r + 8. These bytes lie side by side: a thread
loads 16 of them at once, and need not sort them. Scales and offsets lie group by group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common.ops import Int4Weight, QuantizedWeight, packs_for
from lightserve.common.triton_kernel._gpu import uses_asm

TILE_ROWS = 16
ROWS_OF_TILE = tl.constexpr(TILE_ROWS)
MIN_HALF = 32  # bytes of a group: a thread has 16 of them in the rows r and r + 8


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TiledInt4Weight(Int4Weight):
    """``codes``, ``scales`` and ``offsets`` have the shapes of the usual layout, and other places in memory."""

    done_counts: Tensor  # int32, for each row of tiles: 0 between launches
    zeros: Tensor | None = None  # the zero points, 0 to 15, in float32, so that no kernel divides offsets by scales

    def for_loading(self) -> QuantizedWeight:
        has_offsets, has_zero_points = self.offsets is not None, self.has_zero_points
        return Int4Weight.empty(
            self.shape, self.group_size, self.device, has_offsets=has_offsets, has_zero_points=has_zero_points
        )

    def store_(self, loaded: QuantizedWeight) -> None:
        self.done_counts.zero_()  # their memory may have been given back meanwhile
        self.codes.copy_(tiles_of(loaded.codes, self.group_size // 2))
        self.scales.copy_(loaded.scales)
        if self.offsets is not None and loaded.offsets is not None:
            self.offsets.copy_(loaded.offsets)
            if self.zeros is not None:
                self.zeros.copy_((8 - loaded.offsets / loaded.scales.where(loaded.scales != 0, 1)).round())

    def rows(self, rows: slice | Tensor) -> Int4Weight:  # type: ignore[override]
        """Whole tiles stay tiles."""
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(len(self.codes))
            if begin % TILE_ROWS == 0 and end % TILE_ROWS == 0:
                zeros = None if self.zeros is None else self.zeros[begin:end]
                return replace(self._map(lambda tensor: tensor[begin:end]), zeros=zeros)
            rows = torch.arange(begin, end, device=self.device)
        first = rows // TILE_ROWS * TILE_ROWS
        whole = self.codes[(first[:, None] + torch.arange(TILE_ROWS, device=self.device)).flatten()]
        codes = rows_of_tiles(whole, self.group_size // 2).view(len(rows), TILE_ROWS, -1)
        places = (rows - first)[:, None, None].expand(-1, 1, codes.shape[2])
        return self._usual(codes.gather(1, places)[:, 0], rows)

    def columns(self, columns: slice) -> Int4Weight:  # type: ignore[override]
        return self._in_rows().columns(columns)

    def values(self) -> Tensor:
        return self._in_rows().values()

    def _in_rows(self) -> Int4Weight:
        return self._usual(rows_of_tiles(self.codes, self.group_size // 2), slice(None))

    def _usual(self, codes: Tensor, rows: slice | Tensor) -> Int4Weight:
        offsets = None if self.offsets is None else self.offsets[rows]
        return Int4Weight(codes=codes, scales=self.scales[rows], offsets=offsets, has_zero_points=self.has_zero_points)


def tiles_of(codes: Tensor, half: int) -> Tensor:
    """``codes`` ``[out, in / 2]`` of the usual layout, in the order of tiles."""
    out_size, width = codes.shape
    by_place = codes.view(out_size // TILE_ROWS, 2, 8, width // half, half // MIN_HALF, 2, 2, 4, 2)
    return by_place.permute(0, 3, 4, 2, 7, 5, 6, 1, 8).reshape(out_size, width)


def rows_of_tiles(codes: Tensor, half: int) -> Tensor:
    """The inverse of ``tiles_of``."""
    out_size, width = codes.shape
    by_thread = codes.view(out_size // TILE_ROWS, width // half, half // MIN_HALF, 8, 4, 2, 2, 2, 2)
    return by_thread.permute(0, 7, 3, 1, 2, 5, 6, 4, 8).reshape(out_size, width)


@triton.jit
def code_ptrs(
    codes_ptr, first_row, out_size, row_stride, ROWS: tl.constexpr, HALF: tl.constexpr, IS_TILED: tl.constexpr
):
    """Of the first group of ``ROWS`` rows: ``[rows, HALF]`` or ``[rows of tiles, bytes of a tile]``; then the mask.

    The next group lies as many bytes behind as a row of these has.
    """
    TILE: tl.constexpr = ROWS_OF_TILE if IS_TILED else 1
    rows = first_row + tl.arange(0, ROWS // TILE) * TILE
    ptrs = codes_ptr + rows.to(tl.int64)[:, None] * row_stride + tl.arange(0, TILE * HALF)[None, :]
    return ptrs, (rows < out_size)[:, None]


@triton.jit
def rows_of_tile(codes, ROWS: tl.constexpr, HALF: tl.constexpr):
    """``[ROWS, HALF]`` of tiles ``[ROWS / 16, 16 * HALF]``."""
    by_thread = codes.reshape(ROWS // ROWS_OF_TILE, HALF // 32, 8, 4, 2, 2, 2, 2)
    return by_thread.permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(ROWS, HALF)


@triton.jit
def groups_of_tiles(codes, GROUPS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """``[GROUPS, ROWS, HALF]`` of tiles ``[GROUPS, ROWS / 16, 16 * HALF]``."""
    by_thread = codes.reshape(GROUPS, ROWS // ROWS_OF_TILE, HALF // 32, 8, 4, 2, 2, 2, 2)
    return by_thread.permute(0, 1, 7, 3, 2, 5, 6, 4, 8).reshape(GROUPS, ROWS, HALF)


def empty_tiled(usual: QuantizedWeight, device: torch.device) -> TiledInt4Weight | None:
    """Memory for a weight like ``usual``; None: it is no whole number of tiles."""
    is_int4 = isinstance(usual, Int4Weight) and usual.codes.dim() == 2
    if not is_int4 or len(usual.codes) % TILE_ROWS or usual.group_size // 2 < MIN_HALF:
        return None

    def by_group(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor.T, device=device, memory_format=torch.contiguous_format).T

    return TiledInt4Weight(
        codes=torch.empty_like(usual.codes, device=device),
        scales=by_group(usual.scales),
        offsets=None if usual.offsets is None else by_group(usual.offsets),
        has_zero_points=usual.has_zero_points,
        zeros=by_group(usual.offsets) if usual.has_zero_points and usual.offsets is not None else None,
        done_counts=torch.zeros(len(usual.codes) // TILE_ROWS, dtype=torch.int32, device=device),
    )


@packs_for("triton")
def _empty_packed(usual: QuantizedWeight, device: torch.device, input_bits: int) -> TiledInt4Weight | None:
    return empty_tiled(usual, device) if uses_asm() else None
