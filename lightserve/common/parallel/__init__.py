"""Named groups of ranks (``parallel.tp``, ``.pp``, ``.dp``, ``.ep``) and their collectives."""

from lightserve.common.parallel.groups import Parallel, ParallelSizes, RankGroup
from lightserve.common.parallel.setup import connect_ranks, tcp_store

__all__ = ["Parallel", "ParallelSizes", "RankGroup", "connect_ranks", "tcp_store"]
