"""The numbers of requests that change with every step, in columns: one numpy call plans or reports all decodes.

A request has a row of its own while it waits, and a row of the batch while it runs. Its properties read and write
whichever row it has, so other code need not know.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightserve.utils.int_arrays import Heads, Int64Array, Tails

FIELDS = (
    "prompt_len",
    "max_new_tokens",
    "shared_len",  # how many of its KV slots, at the start, belong to the cache
    "planned_len",  # tokens whose KV is cached, computed, or computed by a planned step
    "certain_len",  # of these, the tokens whose step has completed
    "planned_outputs",  # output tokens that exist after the planned steps, not counting forced ones
    "output_len",  # output tokens that are known
    "is_plain",  # 1: only its length, an end token of the model or its grammar ends it
    "admission",  # number of its admission; 0: it does not run
    "planned_step",  # number of the last step that computes some of its tokens
)


class ReqColumns:
    def __init__(self, rows: int, has_windows: bool = False) -> None:
        """``has_windows``: requests get slots of a windowed pool too."""
        self.values = np.zeros((len(FIELDS), rows), dtype=np.int64)
        (
            self.prompt_len,
            self.max_new_tokens,
            self.shared_len,
            self.planned_len,
            self.certain_len,
            self.planned_outputs,
            self.output_len,
            self.is_plain,
            self.admission,
            self.planned_step,
        ) = self.values
        self.last_token_s: npt.NDArray[np.float64] = np.zeros(rows)
        self.slots = Tails(rows)  # of KV
        self.outputs = Tails(rows)  # token ids
        self.windowed_begin = np.zeros(rows, dtype=np.int64)  # it holds its windowed slots from here on
        self.windowed = Tails(rows) if has_windows else None  # slots
        self.leaving = Heads(rows) if has_windows else None  # windowed slots from ``windowed_begin`` on

    def unplanned(self, rows: Int64Array) -> Int64Array:
        """Tokens without planned KV, among those that are known after the steps planned so far.

        A planned step may sample the last token, whose KV is never needed.
        """
        values = self.values[:, rows]
        prompt_len, max_new_tokens, _, planned_len, _, planned_outputs, *_ = values
        return np.where(planned_outputs >= max_new_tokens, 0, prompt_len + planned_outputs - planned_len)

    def in_flight(self, rows: Int64Array) -> Int64Array:
        """Output tokens that steps in flight will return."""
        return self.planned_outputs[rows] - self.output_len[rows]

    def copy_row(self, row: int, source: ReqColumns, source_row: int) -> None:
        """The tails of both rows are empty."""
        self.values[:, row] = source.values[:, source_row]
        self.last_token_s[row] = source.last_token_s[source_row]
        self.windowed_begin[row] = source.windowed_begin[source_row]
        if self.leaving is not None:
            self.leaving.clear(row)
