from __future__ import annotations

from torch import Tensor

from lightserve.common.ops.registry import op


@op
def vocab_embedding(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Rows of this rank's slice of the vocabulary; zeros for the ids of other ranks."""
    local = ids - first_id
    is_mine = (local >= 0) & (local < table.shape[0])
    return table[local * is_mine].masked_fill(~is_mine[:, None], 0)
