"""Has the model workers load LoRA adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from lightserve.io_struct import LoraLoad, LoraLoaded
from lightserve.router.connection import RankConnection
from lightserve.router.rank_calls import RankCalls

FAILED = "a model worker failed while it loaded the adapter"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LoraLoaded).decode


class LoraClient:
    def __init__(self, ranks: Sequence[RankConnection]) -> None:
        self._calls: RankCalls[LoraLoaded | None] = RankCalls(ranks, _first_error, None)

    def load(self, command: LoraLoad) -> asyncio.Future[LoraLoaded | None]:
        """Resolves when all ranks have replied, with the first error if there is one; None: the workers are lost."""
        return self._calls.call(_encode(command))

    def close(self) -> None:
        self._calls.close()


def _first_error(replies: Iterable[bytes | None]) -> LoraLoaded:
    loaded = (LoraLoaded(FAILED) if reply is None else _decode(reply) for reply in replies)
    return next((one for one in loaded if one.error), LoraLoaded())
