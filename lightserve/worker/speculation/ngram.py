"""Proposes what followed the last tokens of a request the last time that they occurred in its text.

No model computes these drafts, so they are almost free. They are good where a text repeats itself or its prompt: edits
of code, summaries, answers that quote, tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import to_device
from lightserve.config.speculation import SpeculativeConfig
from lightserve.messages.int_arrays import Int64Array
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.speculation.token_table import TokenTable


class NgramProposer:
    def __init__(self, config: SpeculativeConfig, table: TokenTable) -> None:
        self._table = table
        self._sizes = ops.NgramSizes(config.prompt_lookup_min, config.prompt_lookup_max, config.num_speculative_tokens)

    def propose(self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Tensor) -> Tensor:
        drafting = np.flatnonzero(counts)
        if not len(drafting):
            return torch.empty(0, dtype=torch.int64, device=ready_len.device)
        counts = counts[drafting]
        drafting_reqs = [reqs[index] for index in drafting.tolist()]
        rows = np.array([req.row for req in drafting_reqs], dtype=np.int64)
        first = np.cumsum(counts) - counts
        drafts_of = np.repeat(np.arange(len(rows)), counts), np.arange(counts.sum()) - np.repeat(first, counts)
        joined = to_device(np.concatenate((drafting, rows, *drafts_of)), ready_len.device)
        chosen, b_row, of_req, number = joined.split_with_sizes([len(rows)] * 2 + [int(counts.sum())] * 2)
        drafts = self._search(drafting_reqs, b_row, ready_len[chosen] + 1)
        return drafts[of_req, number]

    def _search(self, reqs: list[InferReq], b_row: Tensor, b_len: Tensor) -> Tensor:
        """``b_len``: known tokens of each request, which the host may not know."""
        table = self._table
        longest = max(req.total_len + req.columns.drafts_in_flight.item(req.columns_row) for req in reqs)
        columns = table.first_column(reqs), min(table.text_begin + longest, table.token_ids.shape[1])
        texts = ops.DraftTexts(
            table.token_ids, table.rows_of(b_row).int(), table.begins[b_row], b_len.int() + table.text_begin
        )
        return ops.ngram_drafts(texts, columns, self._sizes)
