"""Values of fields that a config.json may lack, of models for which transformers has one for each field."""

from __future__ import annotations

DEEPSEEK_V32 = {
    "rms_norm_eps": 1e-6,
    "head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
GLM_DSA = {
    **DEEPSEEK_V32,
    "rms_norm_eps": 1e-5,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "q_lora_rank": 2048,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "n_group": 1,
    "topk_group": 1,
}
LLAMA4 = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
STEP3P5 = {
    "vocab_size": 128_815,
    "hidden_size": 4096,
    "intermediate_size": 11_264,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
}
MINIMAX = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GEMMA4 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
}
GLM4V = {"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "attention_bias": True}
GLM4V_MOE = {**GLM4V, "num_key_value_heads": 8, "partial_rotary_factor": 0.5}
AFMOE = {
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "sliding_window": 1024,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 6,
    "num_experts": 64,
    "moe_intermediate_size": 1408,
}
_LATENTS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
KIMI_LINEAR = {
    **_LATENTS,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
LING3 = {
    **_LATENTS,
    "rms_norm_eps": 1e-6,
    "first_k_dense_replace": 2,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 768,
    "rope_theta": 6_000_000.0,
}
