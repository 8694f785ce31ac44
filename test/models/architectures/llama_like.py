from __future__ import annotations

from test.models.architectures.case import MAX_LEN, SMALL, Case, without

WINDOW = 24

CASES = {
    "llama": Case("llama", {**SMALL, "head_dim": 16}),
    "llama-biased": Case("llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "llama-left-over-field": Case("llama", {**SMALL, "partial_rotary_factor": 0.5}),
    "qwen2": Case("qwen2", {**SMALL, "tie_word_embeddings": True}),
    "qwen2-window": Case(
        "qwen2", {**SMALL, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen2-window-nowhere": Case(
        "qwen2",
        {**SMALL, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
        without("layer_types"),
    ),
    "qwen3": Case("qwen3", {**SMALL, "head_dim": 16}),
    "bitnet": Case("bitnet", {**SMALL}),
    "bitnet-silu": Case("bitnet", {**SMALL, "hidden_act": "silu", "attention_bias": True, "tie_word_embeddings": True}),
    "bloom": Case("bloom", {"vocab_size": 131, "hidden_size": 48, "n_layer": 2, "n_head": 6, "seq_length": MAX_LEN}),
}
