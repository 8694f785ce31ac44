"""The simulated GPU: how long a step takes, and which tokens it returns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import NO_INT64, Int32Array, Int64Array, int32s, int64s
from lightserve.messages.step import NO_DRAFTS, DraftColumns, Step, TokenColumns

Float64Array = npt.NDArray[np.float64]

EOS, OTHER = 0, 1  # token ids that the simulated model returns
MIN_IDS = 1024  # requests that arrays are made for at once


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step takes. The defaults: Llama-3-8B in bfloat16 on one H200, measured 2026-11-15.

    Matmuls were measured with cuBLAS in a CUDA graph, from 192 tokens on for so long that the GPU is at its power
    limit, as under load; more tokens may take less time. A step that mixes prompts and decodes is one matmul over all
    its tokens. Attention of a prompt takes 31 ms for 32 million pairs of query and key. All the rest takes 2.1 us a
    token.
    """

    matmul_ms: tuple[tuple[int, float], ...] = (
        (1, 4.01), (8, 4.11), (64, 4.27), (128, 4.60), (192, 5.56), (256, 6.66), (320, 7.99), (384, 9.00), (448, 14.1),
        (512, 11.4), (640, 14.5), (768, 16.9), (832, 20.5), (896, 20.8), (960, 21.4), (1024, 22.3), (1152, 24.8),
        (1280, 27.6), (1408, 31.4), (1536, 32.6), (1792, 39.0), (2048, 43.9), (4096, 86.6), (8192, 172.0),
    )  # fmt: skip
    kv_bytes: int = 131_072  # of a token: 32 layers, K and V, 8 heads of 128, 2 bytes
    bytes_per_s: float = 4.15e12
    pairs_per_s: float = 32e6 / 31e-3
    rest_s: tuple[float, float] = (0.5e-3, 2.1e-6)  # everything else: per step, per token

    def scaled(self, factor: float) -> CostModel:
        """Every step takes so many times as long."""
        return replace(
            self,
            matmul_ms=tuple((tokens, ms * factor) for tokens, ms in self.matmul_ms),
            bytes_per_s=self.bytes_per_s / factor,
            pairs_per_s=self.pairs_per_s / factor,
            rest_s=(self.rest_s[0] * factor, self.rest_s[1] * factor),
        )

    def matmul_s(self, tokens: int) -> float:
        """Interpolates linearly between the measured sizes, and extrapolates beyond them."""
        table = self.matmul_ms
        at = min(max(bisect_left(table, (tokens, 0.0)), 1), len(table) - 1)
        (x0, y0), (x1, y1) = table[at - 1], table[at]
        return (y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)) / 1000

    def step_s(self, tokens: int, kv_read: int, pairs: float) -> float:
        """``kv_read``: tokens whose KV the decoding rows read. ``pairs``: query-key pairs of the prompt rows."""
        if not tokens:
            return 0.0
        rest_s = self.rest_s[0] + self.rest_s[1] * tokens
        return self.matmul_s(tokens) + kv_read * self.kv_bytes / self.bytes_per_s + pairs / self.pairs_per_s + rest_s

    def decode_s(self, tokens: int, kv_read: Int64Array) -> Float64Array:
        """``step_s`` of several steps that only decode, to the last bit."""
        rest_s = self.rest_s[0] + self.rest_s[1] * tokens
        seconds: Float64Array = self.matmul_s(tokens) + kv_read * self.kv_bytes / self.bytes_per_s + rest_s
        return seconds


H200 = CostModel()


class WorkerResult(NamedTuple):
    seconds: float  # that the step takes
    tokens: TokenColumns
    drafts: DraftColumns = NO_DRAFTS


class Worker:
    """Runs steps like a model worker, and returns how long each takes. Its arrays have one number per request id."""

    def __init__(self, cost: CostModel, tokens_a_step: float = 1.0) -> None:
        """``tokens_a_step``: of a request, if it has enough drafts: the accepted ones, and one after them."""
        self._cost = cost
        self._accepted = tokens_a_step - 1
        self._rng = np.random.default_rng(0)
        self._left = NO_INT64  # output tokens to come
        self._computed = NO_INT64  # tokens with KV
        self._todo = NO_INT64  # known tokens without KV

    def add(self, req_id: int, output_len: int) -> None:
        """A request that will generate so many tokens."""
        if req_id >= len(self._left):
            more = np.zeros(max(req_id + 1 - len(self._left), len(self._left), MIN_IDS), dtype=np.int64)
            arrays = (np.concatenate((old, more)) for old in (self._left, self._computed, self._todo))
            self._left, self._computed, self._todo = arrays
        self._left[req_id] = output_len

    def plain_steps(self, req_ids: Int64Array) -> int:
        """In so many further steps that decode these requests, none of them ends."""
        return int(self._left[req_ids].min()) - 1

    def kv_len(self, req_ids: Int64Array) -> int:
        return int(self._computed[req_ids].sum())

    def decode(self, req_ids: Int64Array, steps: int) -> None:
        """``run`` with so many steps that decode these requests and no others."""
        self._computed[req_ids] += steps
        self._left[req_ids] -= steps

    def last_ids(self, req_ids: Int64Array, steps: int) -> Iterator[Int32Array]:
        """Which tokens each of the last so many steps of ``decode`` returned, in their order."""
        for later in reversed(range(steps)):
            yield np.where(self._left[req_ids] + later > 0, OTHER, EOS).astype(np.int32)

    def run(self, step: Step) -> WorkerResult:
        for new in step.new:
            self._computed[new.req_id] = len(new.cached_slots)
            self._todo[new.req_id] = len(new.token_ids) - len(new.cached_slots)
        decode_ids = int64s(step.decode_ids)  # their last known token is computed
        kv_read = int(self._computed[decode_ids].sum())
        drafts = self._verify(decode_ids, step)
        self._computed[decode_ids] += 1
        tokens, pairs, ended = len(decode_ids) + int(np.sum(step.draft_counts)), 0.0, []
        for row in step.chunks:
            count, computed = len(row.slots), int(self._computed[row.req_id])
            tokens += count
            if count == 1:
                kv_read += computed
            else:
                pairs += count * (computed + count / 2)
            self._computed[row.req_id] = computed + count
            self._todo[row.req_id] -= count
            if self._todo[row.req_id] <= 0:
                ended.append(row.req_id)
        req_ids = np.concatenate((decode_ids, np.array(ended, dtype=np.int64)))
        self._todo[req_ids] = 1
        self._left[req_ids] -= 1
        last_ids = np.where(self._left[req_ids] > 0, OTHER, EOS).astype(np.int32)
        seconds = self._cost.step_s(tokens, kv_read, pairs)
        if not len(drafts):
            return WorkerResult(seconds, TokenColumns(req_ids, last_ids))
        counts = np.ones(len(req_ids), dtype=np.int32)
        counts[: len(decode_ids)] += int32s(drafts.accepted)
        token_ids = np.full(int(counts.sum()), OTHER, dtype=np.int32)
        token_ids[np.cumsum(counts) - 1] = last_ids
        has_drafts = int32s(step.draft_counts) > 0
        return WorkerResult(seconds, TokenColumns(req_ids, token_ids, counts), drafts.where(has_drafts))

    def _verify(self, decode_ids: Int64Array, step: Step) -> DraftColumns:
        """As many drafts are accepted on average as it was said; none after the end of an output."""
        if not np.any(step.draft_counts):
            return NO_DRAFTS
        always = int(self._accepted)
        wanted = always + (self._rng.random(len(decode_ids)) < self._accepted - always)
        most = np.minimum(int32s(step.draft_counts), np.maximum(self._left[decode_ids] - 1, 0))
        accepted = np.minimum(wanted, most).astype(np.int32)
        self._computed[decode_ids] += accepted
        self._left[decode_ids] -= accepted
        return DraftColumns(decode_ids, int32s(step.draft_counts), accepted)
