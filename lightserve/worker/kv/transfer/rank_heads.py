"""KV between engines with different --tp: which heads of a block go to which rank.

The engine with fewer ranks cuts its blocks by heads, since a rank of it has those of several ranks of the other one.
The other engine sends or receives whole blocks of its own, and does not know of the cut.

    rank 0 of 1  ──block of rank 0, block of rank 1──▶  ranks 0 and 1 of 2
    ranks 0 and 1 of 2  ──cut 0, cut 1──▶  rank 0 of 1, whose block has arrived with the last cut

The pool of a frame says which cut it is: the pools of whole blocks come first, then those of every cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightserve.common.basemodel import TpPartBaseModel
from lightserve.common.parallel import RankGroup
from lightserve.messages.control import MAX_KV_CUTS, can_divide_kv


class Cut(NamedTuple):
    """What a rank of another engine has of the heads of this one: part ``number`` of ``parts``, from 0 on."""

    number: int
    parts: int

    @property
    def order(self) -> int:
        """Among those of a rank: its whole block is cut 0 of 1, then come the halves, the quarters and so on."""
        return self.parts - 1 + self.number


WHOLE = Cut(0, 1)


def cut_of(order: int) -> Cut:
    parts = 1 << ((order + 1).bit_length() - 1)
    return Cut(order + 1 - parts, parts)


class Receiver(NamedTuple):
    rank: int
    cut: Cut  # of the sender's block
    placed_as: Cut  # of the receiver's


class RankHeads(NamedTuple):
    """A rank of an engine without pipeline stages."""

    rank: int
    tp: int
    total: tuple[int, ...] | None = None  # heads of all ranks in each KV group; None: their KV is never cut

    def slices(self, cut: Cut) -> tuple[slice, ...] | None:
        """The heads of each KV group; None: all."""
        if cut == WHOLE or self.total is None:
            return None
        this, peer = RankGroup(self.rank, self.tp), RankGroup(self.rank * cut.parts + cut.number, self.tp * cut.parts)
        pairs = ((this.part_of(heads).start, peer.part_of(heads)) for heads in self.total)
        return tuple(slice(heads.start - begin, heads.stop - begin) for begin, heads in pairs)

    def cuts(self) -> Iterator[Cut]:
        """Those that other engines may send, in their order."""
        yield WHOLE
        count = 2
        while count <= MAX_KV_CUTS and self.total is not None and not self._has_copies(self.tp * count):
            yield from (Cut(number, count) for number in range(count))
            count *= 2

    def receivers(self, others: int) -> list[Receiver] | None:
        """Of an engine with so many ranks; None: it cannot get this KV."""
        if others == self.tp:
            return [Receiver(self.rank, WHOLE, WHOLE)]
        if self.total is None or not can_divide_kv(self.tp, others):
            return None
        copies = self._has_copies(others)
        if others > self.tp:
            count = others // self.tp
            cuts = (WHOLE if copies else Cut(number, count) for number in range(count))
            return [Receiver(self.rank * count + number, cut, WHOLE) for number, cut in enumerate(cuts)]
        number, count = self.rank % (self.tp // others), self.tp // others
        if copies:  # one of those that have the same heads sends them
            return [Receiver(self.rank // count, WHOLE, WHOLE)] if number == 0 else []
        return [Receiver(self.rank // count, WHOLE, Cut(number, count))]

    def _has_copies(self, others: int) -> bool:
        """Ranks of both engines have as many heads: with more ranks, several have the same ones."""
        assert self.total is not None
        return all(max(heads // self.tp, 1) == max(heads // others, 1) for heads in self.total)


class KvRank(NamedTuple):
    heads: RankHeads
    identity: bytes  # of what computes the KV, and of its layout: senders and receivers compare it


def total_heads(model: TpPartBaseModel) -> tuple[int, ...] | None:
    """Of all ranks, in each KV group; None: its KV cannot be cut by heads."""
    layout, specs = model.kv_layout, {spec.layer_num: spec for spec in model.layer_specs}
    if layout.states or model.pp.size > 1 or any(group.layers[0] not in specs for group in layout.groups):
        return None
    return tuple(specs[group.layers[0]].num_kv_heads for group in layout.groups)
