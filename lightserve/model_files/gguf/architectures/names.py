"""The names of tensors that several architectures share: llama.cpp's, and those of transformers."""

from __future__ import annotations

from lightserve.model_files.gguf.architectures.architecture import Names, RowOrder

LAYERS = "model.layers"
PERMUTED_QK = {"attn_q": RowOrder.ROTARY_PAIRS, "attn_k": RowOrder.ROTARY_PAIRS}
LLAMA: Names = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS: Names = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
QWEN3: Names = LLAMA | QK_NORMS
# a norm behind each half of a layer instead of before it
NORMS_BEHIND: Names = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
EXPERTS: Names = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_gate_up_exps": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
MIXTRAL_EXPERTS: Names = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_gate_up_exps": ("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"),
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
GPT2: Names = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
