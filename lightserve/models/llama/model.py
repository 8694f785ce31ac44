"""Llama: rotary positions, RMSNorm, grouped KV heads and a gated SiLU feed-forward, all from the template."""

from __future__ import annotations

from lightserve.common import basemodel as bm
from lightserve.errors import ModelFilesError


class LlamaPreAndPostLayerWeight(bm.PreAndPostLayerWeight):
    def __init__(self, config: bm.ModelConfig, context: bm.WeightContext) -> None:
        vocab = (config.vocab_size, config.hidden_size, context)
        self.embedding = bm.VocabWeight("model.embed_tokens", *vocab)
        self.final_norm = bm.RmsNormWeight("model.norm", config.hidden_size, config.norm_eps, context)
        self.lm_head = self.embedding if config.tie_word_embeddings else bm.VocabWeight("lm_head", *vocab)


class LlamaTransformerLayerWeight(bm.RotaryDecoderLayerWeight):
    def __init__(self, layer_num: int, config: bm.ModelConfig, context: bm.WeightContext) -> None:
        at, hidden, dim = f"model.layers.{layer_num}", config.hidden_size, config.head_dim
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        qkv = [bm.Block(f"{at}.self_attn.{name}_proj", count, dim) for name, count in heads.items()]
        gate_up = [bm.Block(f"{at}.mlp.{name}_proj", config.intermediate_size) for name in ("gate", "up")]
        qkv_bias, o_bias, mlp_bias = self._biases(config)
        self.att_norm = bm.RmsNormWeight(f"{at}.input_layernorm", hidden, config.norm_eps, context)
        self.qkv_proj = bm.ColumnWeight(qkv, hidden, context, bias=qkv_bias)
        self.o_proj = bm.RowWeight(f"{at}.self_attn.o_proj", config.num_heads * dim, hidden, context, bias=o_bias)
        self.ffn_norm = bm.RmsNormWeight(f"{at}.post_attention_layernorm", hidden, config.norm_eps, context)
        self.gate_up_proj = bm.ColumnWeight(gate_up, hidden, context, bias=mlp_bias)
        self.down_proj = bm.RowWeight(f"{at}.mlp.down_proj", config.intermediate_size, hidden, context, bias=mlp_bias)

    def _biases(self, config: bm.ModelConfig) -> tuple[bool, bool, bool]:
        """Whether q, k and v, the output projection, and the feed-forward have biases."""
        attention = config.hf.get("attention_bias", False)
        return attention, attention, config.hf.get("mlp_bias", False)


class LlamaTpPartModel(bm.RotaryModel):
    pre_and_post_weight_class = LlamaPreAndPostLayerWeight
    transformer_weight_class = LlamaTransformerLayerWeight
    transformer_layer_infer_class = bm.RotaryDecoderLayerInferTpl

    def _verify_params(self) -> None:
        act = self.config.hf.get("hidden_act", "silu")
        if act != "silu":
            raise ModelFilesError(
                f"config.json: hidden_act {act!r} is not supported for {self.config.model_type}; silu is"
            )
        if self.config.hf.get("use_sliding_window"):
            raise ModelFilesError(
                "config.json: use_sliding_window is not supported; set it to false to attend to all tokens"
            )
