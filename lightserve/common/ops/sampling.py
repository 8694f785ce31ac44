"""From logits to tokens. Logits are ``[batch, vocab]``, one request a row, in float32 for all ops but ``sample``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lightserve.common.ops.registry import op

Ints = TypeVar("Ints", Tensor, np.ndarray)

NO_TOKEN = -1  # the sample of a row whose logits are not finite numbers
MAX_TOP_K, MAX_TOP_K_LENGTH = 64, 2**25  # that kernels of top_k must take
HALF_STEP = 2.0**-24  # of a 23-bit uniform: keeps it inside (0, 1); with 24 bits the largest would round to 1


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalised rows of a batch, and which tokens their requests have seen."""

    rows: Tensor  # [penalised] int32, of the logits, each once
    b_repetition: Tensor  # [penalised] float32, 1 = none: divides positive logits, multiplies negative ones
    b_presence: Tensor  # [penalised] float32, 0 = none: subtracted once from tokens of the output
    b_frequency: Tensor  # [penalised] float32, 0 = none: subtracted for each occurrence in the output
    b_seen_row: Tensor  # [penalised] int32, of ``seen``
    seen: Tensor  # [requests, vocab] int32: 1 for a token of the prompt, and 2 for each time that the output has it


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens the rows of a batch may sample."""

    b_row: Tensor  # [batch] int32: the row of ``bitmask``, each once; -1: all tokens are allowed
    bitmask: Tensor  # [masks, words] int32: see mask_logits


@op
def mask_logits(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place. ``rows`` int32 are the masked rows, each once.

    ``bitmask`` int32 ``[rows, words]``: bit i of word w is token 32 * w + i. It has at least one bit for every token.
    """
    tokens = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (bitmask[:, tokens // 32] >> (tokens % 32)) & 1
    logits[rows] = logits[rows].masked_fill(is_allowed == 0, float("-inf"))


@op
def apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    """Penalise in place: repetition first, then frequency and presence."""
    which, tokens = penalties.seen[penalties.b_seen_row].nonzero(as_tuple=True)
    counts = penalties.seen[penalties.b_seen_row[which], tokens] >> 1
    rows, repetition = penalties.rows[which], penalties.b_repetition[which]
    picked = logits[rows, tokens]
    picked = torch.where(picked > 0, picked / repetition, picked * repetition)
    picked -= penalties.b_frequency[which] * counts + penalties.b_presence[which] * (counts > 0)
    logits[rows, tokens] = picked


@op
def top_k_top_p_min_p(logits: Tensor, b_top_k: Tensor, b_top_p: Tensor, b_min_p: Tensor) -> None:
    """Keep the tokens that top-k, then top-p of the rest, and min-p keep; set the other logits to -inf, in place.

    Tokens of equal logits are kept or dropped together. ``b_top_k`` int32, vocab or more = all; ``b_top_p`` float32,
    1 = all; ``b_min_p`` float32, a share of the best token's probability, 0 = all.
    """
    ordered = logits.sort(-1, descending=True).values
    kth = ordered.gather(1, (b_top_k.long().clamp(1, logits.shape[1]) - 1)[:, None])
    ordered = ordered.masked_fill(ordered < kth, float("-inf"))
    probs = ordered.softmax(-1)
    is_in_nucleus = (probs.cumsum(-1) - probs < b_top_p[:, None]) | (b_top_p[:, None] >= 1)
    nucleus_end = ordered.masked_fill(~is_in_nucleus, float("inf")).amin(-1, keepdim=True)
    min_p_end = ordered[:, :1] + b_min_p[:, None].log()
    logits.masked_fill_((logits < kth) | (logits < nucleus_end) | (logits < min_p_end), float("-inf"))


@op
def typical_p(logits: Tensor, b_typical_p: Tensor) -> None:
    """Keep the locally typical tokens, whose information is nearest to the entropy; set other logits to -inf, in place.

    As many are kept as hold the mass ``b_typical_p``, float32, 1 = all; tokens of equal distance are kept or dropped
    together. The information -log p of a token is as far from its mean, the entropy, as its logit from the mean logit.
    """
    probs = logits.softmax(-1)
    mean = (probs * logits).nansum(-1, keepdim=True)  # 0 * -inf counts as 0
    distance = (logits - mean).abs()
    ordered, order = distance.sort(-1)
    is_short = probs.gather(1, order).cumsum(-1) < b_typical_p[:, None]
    last = is_short.sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    logits.masked_fill_((distance > ordered.gather(1, last)) & (b_typical_p[:, None] < 1), float("-inf"))


@op
def sample(
    logits: Tensor, b_temperature: Tensor, b_seed: Tensor, b_position: Tensor, masks: TokenMasks | None = None
) -> Tensor:
    """A token of each row, int64: the first of the most likely ones if ``b_temperature`` is 0, else a random one.

    The random one is sampled from softmax(logits / temperature) by Gumbel noise that depends only on (seed, position,
    token), so a seed gives the same text in any batch. Logits are of any float type. A row that holds NaN or +inf, or
    nothing but -inf, gives NO_TOKEN. ``b_temperature`` float32, ``b_seed`` int64, ``b_position`` int32. With ``masks``
    only allowed tokens count, and a masked row without an allowed token gives token 0.
    """
    scores = logits.float().nan_to_num(float("inf"), float("inf"), float("-inf"))
    if masks is not None:
        rows = (masks.b_row >= 0).nonzero()[:, 0]
        mask_logits(scores, rows.int(), masks.bitmask[masks.b_row[rows].long()])
    rows = b_temperature.nonzero()[:, 0]
    if len(rows):  # noise costs more than all the rest, and greedy rows need none
        scores[rows] = scores[rows] / b_temperature[rows, None] + _noise(b_seed[rows], b_position[rows], scores)
    sampled = scores.argmax(-1, keepdim=True)
    best = scores.gather(1, sampled)
    sampled = sampled.where(best.isfinite(), NO_TOKEN)[:, 0]
    return sampled if masks is None else sampled.masked_fill(best.isneginf()[:, 0] & (masks.b_row >= 0), 0)


@op
def sample_part(logits: Tensor, b_temperature: Tensor, b_seed: Tensor, b_position: Tensor, first_token: int) -> Tensor:
    """The best token of each row among those of a part of the vocabulary, which begins with ``first_token``.

    ``[batch, 2]`` float32: its score, with the noise of ``sample``, and its id. Of NaN and +inf the score is inf, of
    nothing but -inf it is -inf. ``best_of_parts`` makes of all parts what ``sample`` gives for the whole vocabulary.
    """
    scores = logits.float().nan_to_num(float("inf"), float("inf"), float("-inf"))
    rows = b_temperature.nonzero()[:, 0]
    if len(rows):
        noise = _noise(b_seed[rows], b_position[rows], scores, first_token)
        scores[rows] = scores[rows] / b_temperature[rows, None] + noise
    if not logits.shape[1]:  # a rank may have no token of a small vocabulary
        scores = scores.new_full((len(scores), 1), float("-inf"))
    best, token = scores.max(-1)
    return torch.stack((best, (token + first_token).float()), dim=-1)


def best_of_parts(parts: Tensor) -> Tensor:
    """The token of each row, int64. ``parts`` ``[batch, parts, 2]``: results of ``sample_part``, in their order."""
    best, best_part = parts[..., 0].max(-1)
    tokens = parts[..., 1].gather(1, best_part[:, None])[:, 0].long()
    return tokens.where(best.isfinite(), NO_TOKEN)


def _noise(b_seed: Tensor, b_position: Tensor, scores: Tensor, first_token: int = 0) -> Tensor:
    tokens = torch.arange(first_token, first_token + scores.shape[1], device=scores.device)
    return noise_of(counter_uniform(b_seed[:, None], b_position[:, None].long(), tokens))


@op
def top_k(x: Tensor, k: int, dim: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The ``k`` largest or smallest values along any dimension, in order, and where they are (int64).

    NaN is larger than all numbers. Of equal values the first one comes first. Kernels take any strides.
    """
    values, places = x.sort(stable=True, dim=dim, descending=largest)
    return values.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()


def noise_of(uniform: Tensor) -> Tensor:
    """Gumbel noise from uniform numbers."""
    return -(-uniform.log()).log()


def counter_uniform(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Uniform float32 numbers in (0, 1) from three counters: a chain of 32-bit hashes (lowbias32) in int64."""
    return uniform_of((hash32(noise_key(seed, position) ^ token) >> 9).float())


def noise_key(seed: Tensor, position: Tensor) -> Tensor:
    """The part of the hash that all tokens at a position share: 32 bits, in int64."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return hash32(hash32(hash32(low) ^ high) ^ position)


def uniform_of(bits: Tensor) -> Tensor:
    """Numbers in (0, 1) from integers of 23 bits: the middles of 2^23 equal steps, exact in float32."""
    return bits * 2.0**-23 + HALF_STEP


def hash32(x: Ints) -> Ints:
    """lowbias32 of 32-bit integers, which are in int64 or in a uint32 array."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    hashed: Ints = x ^ (x >> 16)
    return hashed
