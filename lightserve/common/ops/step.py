"""What begins a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightserve.common.ops.registry import op

CHOSEN = -1  # in ``StepTokens.ids``: the token that was chosen last for the request


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step, each ``[tokens]`` int32."""

    rows: Tensor  # of req_to_token, and of the ids chosen last
    positions: Tensor
    slots: Tensor  # of the KV cache
    ids: Tensor  # or CHOSEN


@op
def place_tokens(tokens: StepTokens, req_to_token: Tensor, last_ids: Tensor) -> Tensor:
    """Enter the slot of every token in ``req_to_token`` ``[rows, max_len]``; the tokens' ids, int64.

    ``last_ids`` ``[rows]`` int64 never has to reach the host: a request goes on from what the step before chose. Where
    that was no token, which the host is yet to learn, token 0 stands in.
    """
    rows = tokens.rows.long()
    req_to_token[rows, tokens.positions.long()] = tokens.slots
    return tokens.ids.long().where(tokens.ids != CHOSEN, last_ids[rows].clamp(min=0))
