"""Gemma, StableLM, Phi, Cohere, StarCoder, GPT, OPT, Falcon, MPT, Nemotron and Arcee."""

from __future__ import annotations

from test.models.architectures.case import MAX_LEN, SMALL, Case, Json, Tensors

WINDOW = 24
GPT = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": MAX_LEN}
ONE_KV_HEAD = {**SMALL, "num_key_value_heads": 1}
WITHOUT_KV_HEADS = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
WITHOUT_FFN = {key: value for key, value in WITHOUT_KV_HEADS.items() if key != "intermediate_size"}
FALCON = {**WITHOUT_FFN, "num_hidden_layers": 2, "ffn_hidden_size": 80}
OPT = {**WITHOUT_FFN, "ffn_dim": 80, "word_embed_proj_dim": 48}
MPT = {"vocab_size": 131, "d_model": 48, "n_layers": 2, "max_seq_len": MAX_LEN}
GEMMA2 = {**SMALL, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": WINDOW, "query_pre_attn_scalar": 30}
GEMMA3 = {**GEMMA2, "layer_types": ["sliding_attention", "full_attention"] * 2}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0}
SHORT_FACTORS, LONG_FACTORS = [1.0, 1.1, 1.2, 1.5], [1.0, 2.0, 4.0, 8.0]


def _hub_gpt2(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As on the hub: without the prefix, with a buffer for the causal mask."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = tensors["wte.weight"].new_ones(1, 1, 4, 4).tril()
    return config, tensors


def _older_gemma3(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As on the hub: the rotary bases in fields of their own, a pattern instead of layer types."""
    rope = config.pop("rope_parameters")
    del config["layer_types"]
    config["sliding_window_pattern"] = 2
    config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["rope_theta"] = rope["full_attention"].pop("rope_theta")
    config["rope_scaling"] = rope["full_attention"]
    return config, tensors


def _older_gpt_neox(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    rope = config.pop("rope_parameters")
    config["rotary_emb_base"], config["rotary_pct"] = rope["rope_theta"], rope["partial_rotary_factor"]
    return config, tensors


CASES = {
    "gemma": Case("gemma", {**SMALL, "head_dim": 16}),
    "gemma-one-kv-head": Case("gemma", {**ONE_KV_HEAD, "attention_bias": True, "hidden_act": "gelu"}),
    "gemma2": Case(
        "gemma2",
        {
            **GEMMA2,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attn_implementation": "eager",  # transformers' other implementations have no soft cap
        },
    ),
    "gemma2-no-softcaps": Case("gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3_text": Case("gemma3_text", GEMMA3),
    "gemma3_text-softcap": Case("gemma3_text", {**GEMMA3, "attn_logit_softcapping": 2.0}),
    "gemma3_text-older-config": Case(
        "gemma3_text",
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        convert=_older_gemma3,
    ),
    "gemma3": Case(
        "gemma3",
        {
            "text_config": {**GEMMA3, "vocab_size": 131},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": 130,
        },
    ),
    "stablelm": Case("stablelm", {**SMALL, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": Case("stablelm", {**SMALL, "use_parallel_residual": True, "qk_layernorm": True}),
    "phi": Case("phi", {**SMALL, "partial_rotary_factor": 0.5}),
    "phi-mha": Case("phi", {**WITHOUT_KV_HEADS, "partial_rotary_factor": 0.25}),
    "phi3": Case("phi3", {**SMALL, "sliding_window": WINDOW, "pad_token_id": 0}),
    "phi3-partial": Case(
        "phi3", {**SMALL, "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "pad_token_id": 0}
    ),
    "phi3-longrope-short": Case(
        "phi3",
        {
            **SMALL,
            "max_position_embeddings": 4 * MAX_LEN,
            "original_max_position_embeddings": MAX_LEN,
            "rope_parameters": {**LONGROPE, "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS},
            "pad_token_id": 0,
        },
    ),
    "phi3-longrope-long": Case(
        "phi3",
        {
            **SMALL,
            "original_max_position_embeddings": 32,
            "rope_parameters": {**LONGROPE, "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS},
            "pad_token_id": 0,
        },
    ),
    "phi3-longrope-partial": Case(
        "phi3",
        {
            **SMALL,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {**LONGROPE, "short_factor": SHORT_FACTORS[:3], "long_factor": LONG_FACTORS[:3]},
            "pad_token_id": 0,
        },
    ),
    "cohere": Case("cohere", {**SMALL, "logit_scale": 0.25}),
    "cohere-qk-norm": Case("cohere", {**SMALL, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": Case("cohere2", {**SMALL, "num_hidden_layers": 5, "sliding_window": WINDOW}),
    "starcoder2": Case("starcoder2", {**SMALL, "sliding_window": WINDOW}),
    "starcoder2-no-bias": Case("starcoder2", {**SMALL, "use_bias": False}),
    "gpt_bigcode": Case("gpt_bigcode", GPT),
    "gpt_bigcode-mha": Case("gpt_bigcode", {**GPT, "multi_query": False, "n_inner": 80}),
    "gpt2": Case("gpt2", GPT),
    "gpt2-hub": Case("gpt2", {**GPT, "scale_attn_by_inverse_layer_idx": True, "n_inner": 80}, convert=_hub_gpt2),
    "opt": Case("opt", OPT),
    "opt-no-bias": Case("opt", {**OPT, "enable_bias": False}),
    "falcon-7b": Case("falcon", FALCON),
    "falcon-7-heads": Case(
        "falcon", {**FALCON, "hidden_size": 56, "num_attention_heads": 7}, divides_among_ranks=False
    ),
    "falcon-40b": Case("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": Case(
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon-rw": Case(  # transformers rounds ALiBi to bfloat16, which is exact with 8 heads and short prompts
        "falcon",
        {
            **FALCON,
            "num_attention_heads": 8,
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
            "num_kv_heads": 8,
        },
    ),
    "mpt": Case("mpt", {**MPT, "n_heads": 6}),
    "mpt-clipped": Case("mpt", {**MPT, "n_heads": 4, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4}}),
    "gpt_neox": Case(
        "gpt_neox", {**WITHOUT_KV_HEADS, "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}}
    ),
    "gpt_neox-older-config": Case(
        "gpt_neox",
        {
            **WITHOUT_KV_HEADS,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5},
            "use_parallel_residual": False,
        },
        convert=_older_gpt_neox,
    ),
    "gptj": Case("gptj", {**GPT, "rotary_dim": 6}),
    "nemotron": Case("nemotron", {**SMALL, "head_dim": 16}),
    "nemotron-biased": Case("nemotron", {**SMALL, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "arcee": Case("arcee", {**SMALL, "head_dim": 16, "mlp_bias": True}),
}
