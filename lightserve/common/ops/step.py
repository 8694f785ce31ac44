"""The first ops of a step: its tokens with their slots, its drafts, and the embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightserve.common.ops.registry import op

LAST_SAMPLED = -1  # in ``StepTokens.ids``: the token that was sampled last for the request
COUNTED = -1  # in ``StepReqs.ready_len``: as many tokens as the device counted
NO_SLOT = -1  # in place of a new slot
NO_DRAFT = -1  # in place of a draft
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


@dataclass(frozen=True, slots=True)
class DraftTexts:
    """The texts of requests, as rows of a table. A negative id stands between two parts of a text."""

    token_ids: Tensor  # [rows, columns] int32
    rows: Tensor  # [requests] int32
    begins: Tensor  # [requests] int32: the columns of their first tokens
    ends: Tensor  # [requests] int32: the columns after their last tokens


@dataclass(frozen=True, slots=True)
class NgramSizes:
    least: int  # tokens of an n-gram
    most: int
    drafts: int  # of a request


@op
def ngram_drafts(texts: DraftTexts, columns: tuple[int, int], sizes: NgramSizes) -> Tensor:
    """The tokens that followed the end of each text where it occurred before: ``[requests, drafts]`` int64.

    Of all places where the last n tokens occur, the last one with the largest n counts. If it is so near to the end
    that its followers are fewer than the drafts, they are repeated: the text has this period. Where there are no
    followers, and in rows without an n-gram of ``sizes.least`` tokens, drafts are NO_DRAFT.

    All texts lie within ``columns``, which the host knows; it need not know their ends.
    """
    first, end = columns
    rows = texts.rows.long()
    positions = torch.arange(first, end, device=rows.device)
    window = texts.token_ids[rows, first:end]
    last = texts.ends.long() - 1
    is_text = (positions >= texts.begins[:, None]) & (window >= 0)
    lengths = _matching_tokens(texts, window, is_text, sizes.most)
    is_before_end = positions < last[:, None]
    places = torch.arange(end - first, device=rows.device)
    score = torch.where(is_before_end & (lengths >= sizes.least), lengths * (end - first) + places, -1).amax(-1)
    match = first + score.clamp(min=0) % (end - first)
    number = torch.arange(sizes.drafts, device=rows.device)
    followers = match[:, None] + 1 + number % (last - match).clamp(min=1)[:, None]
    drafts = texts.token_ids[rows[:, None], followers.clamp(max=texts.token_ids.shape[1] - 1)].long()
    return drafts.where(score[:, None] >= 0, NO_DRAFT).clamp(min=NO_DRAFT)


def _matching_tokens(texts: DraftTexts, window: Tensor, is_text: Tensor, most: int) -> Tensor:
    """How many tokens up to each place are the last ones of the text, ``most`` at most: ``[requests, places]``."""
    rows, size = texts.rows.long(), window.shape[1]
    lengths = torch.zeros(window.shape, dtype=torch.int64, device=window.device)
    matches = torch.ones(window.shape, dtype=torch.bool, device=window.device)
    for back in range(min(most, size)):
        column = texts.ends.long() - 1 - back
        wanted = texts.token_ids[rows, column.clamp(min=0)].where(column >= texts.begins, -1)
        is_same = (window == wanted[:, None]) & is_text
        matches = matches & F.pad(is_same[:, : size - back], (back, 0))
        lengths = lengths + matches
    return lengths


@op
def vocab_embedding(ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Rows of this rank's slice of the vocabulary; zeros for the ids of other ranks."""
    local = ids - first_id
    is_mine = (local >= 0) & (local < table.shape[0])
    return table[local * is_mine].masked_fill(~is_mine[:, None], 0)
