"""The numbers of a worker's requests that every step needs, in columns: one numpy call packs or collects all decodes.

A request has a row of its own until it enters the batch, and after it has left. In the batch its row is the one of
req_to_token. Its properties read and write whichever row it has, so other code need not know.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import Int32Array, Int64Array, Tails

FIELDS = (
    "cache_len",  # tokens in the KV cache, with those of the step that was packed last, without drafts in flight
    "known_len",  # tokens without the sampled one that is still in flight
    "total_len",  # tokens with that one, without drafts in flight
    "last_known",  # id of the last known token
    "leading_len",  # tokens as it entered, whose slots other requests may share
    "seed",
    "lora_slot",  # of its adapter
    "is_plain",  # 1: all its tokens are returned without details
    "reads_tokens",  # 1: its tokens so far change how the next one is sampled
    "req_id",
    "spare_slots",  # KV slots that it has for the tokens after ``cache_len``: rejected drafts, and those in flight
    "drafts_in_flight",  # up to so many tokens more than ``cache_len`` and ``total_len`` there may be
    "entry",  # number of its entry into the batch; 0: nothing is in this row
)


class ReqColumns:
    def __init__(self, rows: int) -> None:
        self.values = np.zeros((len(FIELDS), rows), dtype=np.int64)
        (
            self.cache_len,
            self.known_len,
            self.total_len,
            self.last_known,
            self.leading_len,
            self.seed,
            self.lora_slot,
            self.is_plain,
            self.reads_tokens,
            self.req_id,
            self.spare_slots,
            self.drafts_in_flight,
            self.entry,
        ) = self.values
        self.temperature: npt.NDArray[np.float32] = np.zeros(rows, dtype=np.float32)
        self.known = Tails(rows)  # token ids

    def accept(self, rows: Int64Array, accepted: Int32Array, drafts: Int64Array) -> None:
        """So many of these drafts, which were in flight, were accepted."""
        self.cache_len[rows] += accepted
        self.total_len[rows] += accepted
        self.spare_slots[rows] -= accepted
        self.drafts_in_flight[rows] -= drafts

    def copy_row(self, row: int, source: ReqColumns, source_row: int) -> None:
        """The tails of both rows are empty."""
        self.values[:, row] = source.values[:, source_row]
        self.temperature[row] = source.temperature[source_row]


def _column(name: str) -> Any:
    """A property that is kept in a column of ReqColumns, which documents it."""

    def get(req: ReqLengths) -> int:
        number: int = getattr(req.columns, name).item(req.columns_row)
        return number

    def set_(req: ReqLengths, value: int) -> None:
        getattr(req.columns, name)[req.columns_row] = value

    return property(get, set_)


class ReqLengths:
    """How many tokens of a request are known, sampled and computed."""

    columns: ReqColumns
    columns_row: int  # row of ``columns``
    cache_len: int = _column("cache_len")
    known_len: int = _column("known_len")
    total_len: int = _column("total_len")
