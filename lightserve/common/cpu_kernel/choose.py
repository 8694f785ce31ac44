"""Choosing among few tokens: where a mask allows no more, nothing else of the row is looked at.

To draw from 32 rows of 49,152 tokens takes one thread 35 ms, among a hundred of each 1.3 ms.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.sampling import counter_uniform

# Share of a mask's words with a bit, up to which to list what it allows takes less time than to look at the whole row:
# with 49,152 tokens 800 of them, scattered, where the likeliest is taken, and 4,500 where noise is spared by it.
FEW_TAKEN = 0.4
FEW_DRAWN = 0.95


@ops.choose.impl("cpu")
def choose(
    logits: Tensor, b_temperature: Tensor, b_seed: Tensor, b_position: Tensor, masks: ops.TokenMasks | None = None
) -> Tensor:
    from_all = ops.choose.impls[ops.REFERENCE]
    if masks is None or not len(few := _rows_with_few(masks, b_temperature)):
        return from_all(logits, b_temperature, b_seed, b_position, masks)
    chosen = torch.zeros(len(logits), dtype=torch.int64)
    rest = np.setdiff1d(np.arange(len(logits)), few)
    if len(rest):
        others = ops.TokenMasks(masks.b_row[rest], masks.bitmask)
        chosen[rest] = from_all(logits[rest], b_temperature[rest], b_seed[rest], b_position[rest], others)
    which, tokens = _allowed(masks.bitmask[masks.b_row[few].long()].numpy(), logits.shape[1])
    at = few[which]
    noise = _gumbel(b_seed[at], b_position[at], torch.from_numpy(tokens))
    scores = _scores(logits[at, tokens].float(), b_temperature[at], noise)
    chosen[few] = torch.from_numpy(_first_best(scores.numpy(), which, tokens, len(few)))
    return chosen


def _rows_with_few(masks: ops.TokenMasks, b_temperature: Tensor) -> np.ndarray:
    """Rows of the batch whose masks have a bit in few words."""
    mask_rows = masks.b_row.numpy()
    share = np.count_nonzero(masks.bitmask.numpy(), axis=1) / masks.bitmask.shape[1]
    most = np.where(b_temperature.numpy() > 0, FEW_DRAWN, FEW_TAKEN)
    return np.flatnonzero((mask_rows >= 0) & (share[mask_rows] <= most))


def _allowed(bitmask: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and tokens of the bits that are set, in their order."""
    rows, words = np.nonzero(bitmask)
    bits = np.unpackbits(bitmask[rows, words].view(np.uint8), bitorder="little").reshape(-1, 32)
    entries, places = np.nonzero(bits)
    tokens = 32 * words[entries] + places
    is_known = tokens < vocab
    return rows[entries][is_known], tokens[is_known]


def _gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    return -(-counter_uniform(seed, position.long(), token).log()).log()


def _scores(logits: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """As the definition has them."""
    logits = logits.nan_to_num(float("inf"), float("inf"), float("-inf"))
    return torch.where(temperature > 0, logits / temperature + noise, logits)


def _first_best(scores: np.ndarray, rows: np.ndarray, tokens: np.ndarray, count: int) -> np.ndarray:
    """Of each of ``count`` rows the first token with the best score, 0 if it has none, NO_TOKEN if that is infinite."""
    chosen = np.zeros(count, dtype=np.int64)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    if len(starts):
        lengths = np.diff(starts, append=len(rows))
        best = np.maximum.reduceat(scores, starts)
        is_best = scores == np.repeat(best, lengths)
        first = np.minimum.reduceat(np.where(is_best, tokens, tokens.max()), starts)
        chosen[rows[starts]] = np.select([np.isfinite(best), np.isneginf(best)], [first, 0], ops.NO_TOKEN)
    return chosen
