"""Rows of ``req_to_token``: which slot holds each token of each running request."""

from __future__ import annotations

import torch


class ReqManager:
    """``max_reqs`` rows of ``max_len`` tokens, and one more row for the padding of a batch."""

    def __init__(self, max_reqs: int, max_len: int, device: torch.device) -> None:
        self.max_reqs = max_reqs
        self.max_len = max_len
        self.req_to_token = torch.zeros(max_reqs + 1, max_len, dtype=torch.int32, device=device)
        self.group_req_to_token: list[torch.Tensor] = []  # the same for each KV group that has a pool
        self._free_rows = list(range(max_reqs - 1, -1, -1))

    def set_num_groups(self, num_groups: int) -> None:
        """``num_groups``: KV groups with pools of their own."""
        self.group_req_to_token = [torch.zeros_like(self.req_to_token) for _ in range(num_groups)]

    @property
    def padding_row(self) -> int:
        return self.max_reqs

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    def alloc(self) -> int:
        if not self._free_rows:
            raise ValueError(f"all {self.max_reqs} request rows are taken; the scheduler admitted too many requests")
        return self._free_rows.pop()

    def free_all(self) -> None:
        self._free_rows = list(range(self.max_reqs - 1, -1, -1))

    def free(self, row: int) -> None:
        if row in self._free_rows:
            raise ValueError(f"request row {row} was freed twice")
        self._free_rows.append(row)
