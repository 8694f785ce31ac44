"""A Llama of two layers with random weights and a tokenizer of bytes, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 384, 2, 4, 2, 64, 256
CONTEXT = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": None,
}
HEAD_SPREAD = 4.0  # of the logits: rounding in 16 bits then seldom changes the most likely token


def write_tiny_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(), folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def _weights() -> dict[str, torch.Tensor]:
    """In bfloat16, so that every device computes with the same numbers."""
    generator = torch.Generator().manual_seed(0)

    def weight(out_size: int, in_size: int, spread: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(out_size, in_size, generator=generator)
        return numbers.mul_(spread * in_size**-0.5).bfloat16()

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(HIDDEN, generator=generator)).bfloat16()

    embedding = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm()}
    tensors["lm_head.weight"] = weight(VOCAB, HIDDEN, HEAD_SPREAD)
    kv_size = KV_HEADS * HEAD_DIM
    sizes = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM)}
    sizes |= {"self_attn.k_proj": (kv_size, HIDDEN), "self_attn.v_proj": (kv_size, HIDDEN)}
    sizes |= {"mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": weight(*size) for name, size in sizes.items()}
        tensors |= {f"{prefix}.{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
    return tensors
