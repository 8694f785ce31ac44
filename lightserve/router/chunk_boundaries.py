"""Where a chunk of a prompt must end, and which of its tokens no chunk may divide.

A snapshot of a recurrent state is taken at the end of a chunk. Tokens of an image that attend to each other in both
directions have to be in one chunk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise

Span = tuple[int, int]  # of positions: the first, and the one after the last


class ChunkBoundaries:
    def __init__(self, ends: Iterable[int] = (), spans: Iterable[Span] = ()) -> None:
        """``ends``: no chunk has tokens before and after such a position. ``spans``: no chunk ends inside of one.

        A cached prefix may end inside of a span. Then one chunk has the rest of it.
        """
        self._ends = sorted(ends)
        self._spans = sorted(spans)
        self._span_ends = [end for _, end in self._spans]
        self.longest_span = max((end - begin for begin, end in self._spans), default=0)
        if any(begin >= end for begin, end in self._spans) or any(a[1] > b[0] for a, b in pairwise(self._spans)):
            raise ValueError(f"spans must have tokens and must not overlap: {self._spans}")
        if not all(map(self.may_end_at, self._ends)):
            raise ValueError(f"a chunk cannot end inside of a span: {self._ends}, {self._spans}")

    def may_end_at(self, position: int) -> bool:
        return self._end_around(position) == position

    def with_ends(self, ends: Iterable[int]) -> ChunkBoundaries:
        """Chunks end at these positions too, except inside of spans."""
        allowed = set(filter(self.may_end_at, ends))
        return ChunkBoundaries({*self._ends, *allowed}, self._spans)

    def __bool__(self) -> bool:
        return bool(self._ends or self._spans)

    def longest_chunk(self, begin: int, most: int) -> int:
        """How many of ``most`` tokens, the first at ``begin``, a chunk may have. 0: it would divide a span."""
        end = begin + most
        number = bisect_right(self._ends, begin)
        if number < len(self._ends):
            end = min(end, self._ends[number])
        number = bisect_right(self._span_ends, end)
        if number < len(self._spans):
            end = min(end, max(self._spans[number][0], begin))
        return end - begin

    def shortest_chunk(self, begin: int) -> int:
        """The fewest tokens that a chunk from ``begin`` on may have: the rest of a span, or one."""
        return self._end_around(begin + 1) - begin

    def _end_around(self, position: int) -> int:
        """The end of the span that a chunk up to here would divide; the position itself if there is none."""
        number = bisect_left(self._span_ends, position)
        if number < len(self._spans) and self._spans[number][0] < position:
            return self._span_ends[number]
        return position


def in_blocks(prompt_len: int, total_len: int, block: int) -> ChunkBoundaries:
    """So that a token is computed in the same way in any step.

    Chunks are whole blocks of the prompt. The last block, which may be shorter, is a chunk of its own. Output tokens of
    a request that was preempted are computed again one by one, like the first time.
    """
    last = max(prompt_len - 1, 0) // block * block
    spans = [(begin, min(begin + block, prompt_len)) for begin in range(0, last + 1, block)]
    return ChunkBoundaries([last, *range(prompt_len, total_len)], spans)


def why_undivided(boundaries: ChunkBoundaries, limit: int) -> str:
    """Why no step, which computes at most ``limit`` tokens, can compute a span at once; empty: one can."""
    if boundaries.longest_span <= limit:
        return ""
    return (
        f"{boundaries.longest_span} tokens of the prompt have to be computed in one step; the limit is {limit} "
        "(--batch_max_tokens, or the KV pool)"
    )


NO_BOUNDARIES = ChunkBoundaries()
