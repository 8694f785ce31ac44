"""Choosing tokens row by row, so that what is made of a row stays in the cache.

Numpy finds the largest of a row and hashes integers of 32 bits several times as fast as torch: of 32 rows of 49,152
tokens each the likeliest in 0.7 ms and one that is drawn in 7 ms, where the definition takes 2 to 3 and 16 to 56 ms.
Where a mask allows few tokens, nothing else of the row is looked at.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.sampling import counter_uniform, noise_key, noise_of, uniform_of

# Share of a mask's words with a bit, up to which to list what it allows takes less time than to look at the whole row:
# with 49,152 tokens 250 of them, scattered, where the likeliest is taken, and 1,800 where noise is spared by it.
FEW_TAKEN = 0.15
FEW_DRAWN = 0.7


@ops.choose.impl("cpu")
def choose(
    logits: Tensor, b_temperature: Tensor, b_seed: Tensor, b_position: Tensor, masks: ops.TokenMasks | None = None
) -> Tensor:
    logits = logits.float()
    chosen = np.zeros(len(logits), dtype=np.int64)
    few = np.zeros(0, dtype=np.int64)
    if masks is not None and len(few := _rows_with_few(masks, b_temperature)):
        which, tokens = _allowed(masks.bitmask[masks.b_row[few].long()].numpy(), logits.shape[1])
        at = few[which]
        uniform = counter_uniform(b_seed[at], b_position[at].long(), torch.from_numpy(tokens))
        scores = _scores(logits[at, tokens], b_temperature[at], noise_of(uniform))
        chosen[few] = _best_of_each(scores.numpy(), which, tokens, len(few))
    keys = noise_key(b_seed, b_position.long()).numpy().astype(np.uint32)
    for row in np.setdiff1d(np.arange(len(logits)), few).tolist():
        scores = logits[row]
        if b_temperature[row] > 0:
            scores = _scores(scores, b_temperature[row], noise_of(_uniform(keys[row], len(scores))))
        chosen[row] = _best(scores.numpy(), None if masks is None else _mask(masks, row))
    return torch.from_numpy(chosen)


def _scores(logits: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    return torch.where(temperature > 0, logits / temperature + noise, logits)


def _uniform(key: np.uint32, vocab: int) -> Tensor:
    """``counter_uniform`` of all tokens, in half the bits."""
    x = _tokens(vocab) ^ key
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    x >>= np.uint32(9)
    return uniform_of(torch.from_numpy(x.astype(np.float32)))


@lru_cache(maxsize=2)
def _tokens(vocab: int) -> np.ndarray:
    return np.arange(vocab, dtype=np.uint32)


def _mask(masks: ops.TokenMasks, row: int) -> np.ndarray | None:
    """The words whose bits are the tokens that are allowed; None: all are."""
    mask_row = int(masks.b_row[row])
    return None if mask_row < 0 else masks.bitmask[mask_row].numpy().view(np.uint32)


def _best(scores: np.ndarray, mask: np.ndarray | None) -> int:
    """The first token with the best score; NO_TOKEN if that is infinite or NaN, and 0 if a mask leaves none."""
    token = int(scores.argmax())  # a NaN is the largest of all
    if mask is not None and not mask[token // 32] >> np.uint32(token % 32) & 1:  # mostly the best is allowed
        is_allowed = np.unpackbits(mask.view(np.uint8), count=len(scores), bitorder="little").view(np.bool_)
        scores = np.where(is_allowed, scores, -np.inf)
        token = int(scores.argmax())
    if np.isfinite(scores[token]):
        return token
    return 0 if mask is not None and np.isneginf(scores[token]) else ops.NO_TOKEN


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


def _best_of_each(scores: np.ndarray, rows: np.ndarray, tokens: np.ndarray, count: int) -> np.ndarray:
    """What ``_best`` gives for each of ``count`` masked rows, of which ``tokens`` are all that is allowed."""
    chosen = np.zeros(count, dtype=np.int64)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    if len(starts):
        lengths = np.diff(starts, append=len(rows))
        best = np.maximum.reduceat(scores, starts)  # NaN if one is
        is_best = scores == np.repeat(best, lengths)
        first = np.minimum.reduceat(np.where(is_best, tokens, tokens.max()), starts)
        chosen[rows[starts]] = np.select([np.isfinite(best), np.isneginf(best)], [first, 0], ops.NO_TOKEN)
    return chosen
