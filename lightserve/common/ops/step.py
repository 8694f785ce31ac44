"""The first ops of a step: its tokens with their slots, and their embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightserve.common.ops.registry import op

LAST_SAMPLED = -1  # in ``StepTokens.ids``: the token that was sampled last for the request


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step, each ``[tokens]`` int32."""

    rows: Tensor  # of req_to_token, and of the ids sampled last
    positions: Tensor
    slots: Tensor  # of the KV cache
    ids: Tensor  # or LAST_SAMPLED


@op
def place_tokens(tokens: StepTokens, req_to_token: Tensor, last_ids: Tensor) -> Tensor:
    """Write the slot of every token to ``req_to_token`` ``[rows, max_len]`` and return the token ids, int64.

    ``last_ids`` ``[rows]`` int64 holds what the step before sampled, so that the host need not know it yet. NO_TOKEN
    there becomes token 0.
    """
    rows = tokens.rows.long()
    req_to_token[rows, tokens.positions.long()] = tokens.slots
    return tokens.ids.long().where(tokens.ids != LAST_SAMPLED, last_ids[rows].clamp(min=0))


@op
def vocab_embedding(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Rows of this rank's slice of the vocabulary; zeros for the ids of other ranks."""
    local = ids - first_id
    is_mine = (local >= 0) & (local < table.shape[0])
    return table[local * is_mine].masked_fill(~is_mine[:, None], 0)
