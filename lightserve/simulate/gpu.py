"""The simulated GPU: how long a step takes, and which tokens it returns."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from lightserve.io_struct import Step, Token, TokenOut

EOS, OTHER = 0, 1  # token ids that the simulated model returns


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


H200 = CostModel()


class Sequence:
    """A request in the simulated worker."""

    __slots__ = ("computed", "end", "left", "todo", "token")

    def __init__(self, req_id: int, output_len: int) -> None:
        self.token, self.end = TokenOut(req_id, Token(OTHER)), TokenOut(req_id, Token(EOS))  # the same in all steps
        self.left = output_len  # output tokens to come
        self.computed = 0
        self.todo = 0  # known tokens without KV


class Worker:
    """Runs steps like a model worker, and returns how long each takes."""

    def __init__(self, cost: CostModel) -> None:
        self.seqs: dict[int, Sequence] = {}  # all requests that have not ended; they stay while preempted
        self._cost = cost

    def run(self, step: Step) -> tuple[float, list[TokenOut]]:
        for new in step.new:
            seq = self.seqs[new.req_id]
            seq.computed = len(new.cached_slots)
            seq.todo = len(new.token_ids) - seq.computed
        tokens = kv_read = 0
        pairs = 0.0
        outs = []
        for row in step.rows:
            seq = self.seqs[row.req_id]
            count = len(row.slots)
            tokens += count
            if count == 1:
                kv_read += seq.computed
            else:
                pairs += count * (seq.computed + count / 2)
            seq.computed += count
            if seq.todo > count:
                seq.todo -= count
                continue
            seq.todo = 1
            seq.left -= 1
            outs.append(seq.token if seq.left > 0 else seq.end)
        return self._cost.step_s(tokens, kv_read, pairs), outs
