"""Which tokens the queries of a step attend to, and the attention to them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common import basemodel as bm, ops

# Of sparse attention, in one launch. A kernel that divides the work has all of them in one program, and is compiled for
# up to 64, up to 512 and each power of two above. Partial results of 512 rows of 128 heads take 134 MB.
MAX_ROWS = 512


def is_dense(args: bm.ModelArgs) -> bool:
    """All requests are so short that queries attend to all tokens. Then nothing is chosen or stored for it."""
    return args.max_req_total_len <= args.config.count("index_topk")


class SparseInferState(bm.InferStateInfo):
    """A query attends to the ``top_k`` tokens that an indexer chooses, or to all tokens if it sees no more.

    In a step with prompts, queries of the second kind are computed as in dense attention. All others are requests of
    their own for the attention of decodes, with the chosen slots as their table. Which kind a query is depends on its
    position alone. Layers that choose no tokens have those of a layer before.
    """

    top_k: int
    is_dense: bool  # no request of this server has more than ``top_k`` tokens
    slots: Tensor  # [tokens, top_k] int32: of the tokens that were chosen last

    def init_some_extra_state(self, model: bm.TpPartBaseModel, input_ids: Tensor) -> None:
        super().init_some_extra_state(model, input_ids)
        self.top_k, self.is_dense = model.config.count("index_topk"), is_dense(model.args)
        if self.is_dense:
            return
        attn = self.attn
        if self.step.is_prefill:
            self._is_sparse = (self.position_ids >= self.top_k)[:, None, None]
            b_seen = torch.where(self._is_sparse[:, 0, 0], self.top_k, 0).int()
            b_dense_len = torch.minimum(attn.b_seq_len, attn.b_ready_cache_len.clamp(min=self.top_k))
            self.dense_attn = replace(attn, b_seq_len=b_dense_len, plans={})
        else:
            b_seen = attn.b_seq_len.clamp(max=self.top_k)
        self._batches = [self._batch(b_seen[first : first + MAX_ROWS]) for first in range(0, len(b_seen), MAX_ROWS)]

    def _batch(self, b_seen: Tensor) -> ops.AttnBatch:
        """A batch in which each row is a request of so many tokens; its table is not known yet."""
        rows = torch.arange(len(b_seen), dtype=torch.int32, device=b_seen.device)
        return ops.AttnBatch(self.attn.req_to_token, rows, rows, b_seen, (b_seen - 1).clamp(min=0))

    def attend_to_chosen(
        self, q: Tensor, latent_cache: ops.LatentCache, kv_b: Tensor, options: ops.AttnOptions
    ) -> Tensor:
        """Of a step with prompts, only the rows that see more than ``top_k`` tokens."""
        outs, first = [], 0
        for template in self._batches:
            rows = slice(first, first := first + len(template.b_seq_len))
            batch = replace(template, req_to_token=self.slots[rows])
            outs.append(ops.latent_token_attention(q[rows], latent_cache, kv_b, batch, options))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def merged(self, sparse: Tensor, dense: Tensor) -> Tensor:
        """The rows of a step with prompts, each as it was computed."""
        return torch.where(self._is_sparse, sparse, dense)
