"""What steps of other models cost on several H200, estimated from the measured cost of Llama-3-8B on one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightserve.simulate.gpu import H200, CostModel

CARD_BYTES = 141e9
USED = 0.9  # of a card's memory; activations and graphs have the rest
BYTES = 2  # of a weight, of a number in the KV cache and of a hidden state
ALL_REDUCE_S = 8e-6  # for a few bytes
ALL_REDUCE_BYTES_PER_S = 400e9  # of a card, over NVLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder as Llama has it."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128

    @property
    def weights(self) -> int:
        """That a step multiplies with: those of the layers and of the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of a token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * BYTES

    def cost(self, tp: int) -> CostModel:
        """Matmuls and attention are divided by the cards; half of the rest is, and all-reduces are added."""
        share = self.weights / LLAMA_8B.weights / tp
        depth = self.layers / LLAMA_8B.layers
        size = depth * self.hidden / LLAMA_8B.hidden
        step_s, token_s = H200.rest_s
        step_s, token_s = step_s * depth, token_s * size * (1 + 1 / tp) / 2
        if tp > 1:
            sent = 2 * (tp - 1) / tp * self.hidden * BYTES
            step_s += 2 * self.layers * ALL_REDUCE_S
            token_s += 2 * self.layers * sent / ALL_REDUCE_BYTES_PER_S
        return replace(
            H200,
            matmul_ms=tuple((tokens, ms * share) for tokens, ms in H200.matmul_ms),
            kv_bytes=round(self.kv_bytes / tp),
            pairs_per_s=H200.pairs_per_s * LLAMA_8B.heads / self.heads / depth * tp,
            rest_s=(step_s, token_s),
        )

    def pool_size(self, tp: int) -> int:
        """Tokens of KV beside the weights; 0: the weights do not fit."""
        weights = self.weights + self.vocab * self.hidden
        return max(int((CARD_BYTES * USED * tp - weights * BYTES) / self.kv_bytes), 0)


LLAMA_8B = Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
SHAPES = {
    "llama3-8b": LLAMA_8B,
    "llama3-70b": Shape(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256),
}
