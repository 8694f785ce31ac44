"""ERNIE 4.5, Hunyuan, Helium and other dense models since 2025."""

from __future__ import annotations

from test.models.architectures.case import SMALL as SMALL_LLAMA, Case

SMALL = {**SMALL_LLAMA, "num_hidden_layers": 2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = 24
CASES = {
    "ernie4_5": Case("ernie4_5", {**SMALL, "head_dim": 16, "tie_word_embeddings": True}),
    "ernie4_5-biased": Case("ernie4_5", {**SMALL, "head_dim": 8, "use_bias": True, "tie_word_embeddings": False}),
}
