"""Attention in chunks: a token sees only tokens of its chunk, which begins at a multiple of the chunk size.

The tokens of a request in one chunk are a request of their own for the attention: its table begins with the chunk.
"""

from __future__ import annotations

import torch

from lightserve.common import basemodel as bm, ops


class ChunkedInferState(bm.InferStateInfo):
    """All layers with chunks have chunks of one size."""

    _chunks: ops.AttnBatch | None = None

    def chunks(self, size: int) -> ops.AttnBatch:
        """The chunks of the step's requests, in the pool of the layer being computed."""
        if self._chunks is None:
            requests, tokens = len(self.attn.b_req_idx), len(self.position_ids)
            # of a request that ends in another chunk than it begins: the first, the last and whole ones between
            most = 2 * requests + tokens // size if self.step.is_prefill else requests
            self._chunks = chunks_of(self.attn, size, most)
        return self._chunks


def chunks_of(attn: ops.AttnBatch, size: int, most: int) -> ops.AttnBatch:
    """The chunks with new tokens, each a request of up to ``size`` tokens. There are ``most``, the last ones empty.

    The host waits for nothing: only the device knows the lengths.
    """
    device = attn.b_seq_len.device
    ready, seq_len = attn.b_ready_cache_len.long(), attn.b_seq_len.long()
    counts = torch.where(seq_len > ready, (seq_len - 1) // size - ready // size + 1, 0)
    ends = counts.cumsum(0)
    numbers = torch.arange(most, device=device)
    owners = torch.searchsorted(ends, numbers, right=True)
    is_chunk = owners < len(ends)
    owners = owners.clamp(max=len(ends) - 1)
    ready, seq_len = ready[owners], seq_len[owners]
    begins = (ready // size + numbers - (ends - counts)[owners]) * size
    first_new = torch.maximum(begins, ready)
    chunk_ends = torch.minimum(begins + size, seq_len)

    longest = attn.req_to_token.shape[1]
    positions = begins[:, None] + torch.arange(min(size, longest), device=device)
    rows = attn.b_req_idx.long()[owners]
    return ops.AttnBatch(
        req_to_token=attn.req_to_token[rows[:, None], positions.clamp(0, longest - 1)],
        b_req_idx=numbers.int(),
        b_start_loc=(attn.b_start_loc[owners] + first_new - ready).int(),
        b_seq_len=torch.where(is_chunk, chunk_ends - begins, 0).int(),
        b_ready_cache_len=torch.where(is_chunk, first_new - begins, 0).int(),
        has_decodes=attn.has_decodes,
    )
