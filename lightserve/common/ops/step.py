"""The first ops of a step: its tokens with their slots, and their embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightserve.common.ops.registry import op

LAST_SAMPLED = -1  # in ``StepTokens.ids``: the token that was sampled last for the request
COUNTED = -1  # in ``StepReqs.ready_len``: as many tokens as the device counted
NO_SLOT = -1  # in place of a new slot
NO_REQ = -1  # in place of a token's request: the token is padding


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step, each ``[tokens]`` int32."""

    rows: Tensor  # of req_to_token, and of the ids sampled last
    positions: Tensor
    slots: Tensor  # of the KV cache
    ids: Tensor  # or LAST_SAMPLED


@dataclass(frozen=True, slots=True)
class StepReqs:
    """The requests of a step with drafts, each ``[requests]`` int32."""

    rows: Tensor  # of req_to_token, and of the lengths
    starts: Tensor  # their first tokens in the step
    ready_len: Tensor  # tokens that are computed before the step, or COUNTED
    slot_len: Tensor  # tokens that have slots before the step: those, and rejected drafts


@dataclass(frozen=True, slots=True)
class LocatedTokens:
    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int32, of the KV cache
    b_ready_len: Tensor  # [requests] int32


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
def locate_tokens(
    new_slots: Tensor, token_reqs: Tensor, reqs: StepReqs, lengths: Tensor, req_to_token: Tensor
) -> LocatedTokens:
    """Where the tokens of a step are whose requests the host may not know the lengths of.

    The tokens of a request follow those that are computed. While drafts are in flight only the device knows how many
    that are: ``lengths`` ``[rows]`` int32. The first tokens of a request may bring ``new_slots``, the others have
    NO_SLOT there. They are written to ``req_to_token``, after the slots that the request has. ``token_reqs`` are
    places in ``reqs``. Padding, with NO_REQ, is at position 0 and keeps its slot.
    """
    b_ready_len = reqs.ready_len.where(reqs.ready_len != COUNTED, lengths[reqs.rows.long()])
    is_token, places = token_reqs != NO_REQ, token_reqs.clamp(min=0).long()
    rows = reqs.rows[places].long()
    offsets = torch.arange(len(places), dtype=torch.int32, device=places.device) - reqs.starts[places]
    is_new = is_token & (new_slots != NO_SLOT)
    req_to_token[rows[is_new], (reqs.slot_len[places] + offsets)[is_new].long()] = new_slots[is_new]
    positions = torch.where(is_token, b_ready_len[places] + offsets, 0)
    return LocatedTokens(positions, req_to_token[rows, positions.long()].where(is_token, new_slots), b_ready_len)


@op
def vocab_embedding(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Rows of this rank's slice of the vocabulary; zeros for the ids of other ranks."""
    local = ids - first_id
    is_mine = (local >= 0) & (local < table.shape[0])
    return table[local * is_mine].masked_fill(~is_mine[:, None], 0)
