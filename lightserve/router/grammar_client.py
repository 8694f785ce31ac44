"""Has the model workers compile a grammar before a request with it is admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from lightserve.io_struct import GrammarSpec
from lightserve.router.connection import RankConnection
from lightserve.router.rank_calls import RankCalls

_encode_grammar = msgspec.msgpack.Encoder().encode


class GrammarClient:
    def __init__(self, ranks: Sequence[RankConnection]) -> None:
        self._calls: RankCalls[None] = RankCalls(ranks, lambda _: None, None)

    def compile_grammar(self, grammar: GrammarSpec, eos_ids: tuple[int, ...]) -> asyncio.Future[None]:
        """Resolves when all ranks have compiled the grammar, found an error in it, or were lost.

        Errors are not reported here: a request with the grammar fails when it enters the workers.
        """
        return self._calls.call(_encode_grammar((grammar, eos_ids)))

    def close(self) -> None:
        self._calls.close()
