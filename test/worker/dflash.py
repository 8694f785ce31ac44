"""Small DFlash drafters with random weights, in both formats, and what they must compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, LAYERS = 64, 4, 2, 16, 96, 3
EPS, THETA = 1e-5, 5000.0
TARGET_LAYERS = [0, 1]  # of a model with two layers
MASK = 2


def layer_config(vocab_size: int, model_type: str = "qwen3") -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": LAYERS,
        "vocab_size": vocab_size,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 4096,
    }


def drafter_tensors(target_hidden: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def linear(rows: int, columns: int) -> Tensor:
        weight: Tensor = torch.randn(rows, columns, generator=random) * columns**-0.5
        return weight

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=random)

    tensors = {
        "fc.weight": linear(HIDDEN, len(TARGET_LAYERS) * target_hidden),
        "hidden_norm.weight": norm(HIDDEN),
        "norm.weight": norm(HIDDEN),
    }
    for number in range(LAYERS):
        of_layer = {
            "input_layernorm": norm(HIDDEN),
            "post_attention_layernorm": norm(HIDDEN),
            "self_attn.q_proj": linear(HEADS * DIM, HIDDEN),
            "self_attn.k_proj": linear(KV_HEADS * DIM, HIDDEN),
            "self_attn.v_proj": linear(KV_HEADS * DIM, HIDDEN),
            "self_attn.o_proj": linear(HIDDEN, HEADS * DIM),
            "self_attn.q_norm": norm(DIM),
            "self_attn.k_norm": norm(DIM),
            "mlp.gate_proj": linear(WIDTH, HIDDEN),
            "mlp.up_proj": linear(WIDTH, HIDDEN),
            "mlp.down_proj": linear(HIDDEN, WIDTH),
        }
        tensors |= {f"layers.{number}.{name}.weight": tensor for name, tensor in of_layer.items()}
    return tensors


def save_drafter(folder: Path, vocab_size: int, target_hidden: int, drafted: list[int] | None, **fields: Any) -> str:
    """``drafted``: tokens that a drafter in the ``speculators`` format can draft; None: the original format.

    ``fields``: of config.json besides.
    """
    tensors = drafter_tensors(target_hidden)
    config: dict[str, Any] = {"block_size": 4}
    if drafted is None:
        of_dflash = {"mask_token_id": MASK, "target_layer_ids": TARGET_LAYERS}
        config |= {"architectures": ["DFlashDraftModel"], "dflash_config": of_dflash, **layer_config(vocab_size)}
    else:
        random = torch.Generator().manual_seed(1)
        tensors["embed_tokens.weight"] = torch.randn(vocab_size, HIDDEN, generator=random)
        tensors["lm_head.weight"] = torch.randn(len(drafted), HIDDEN, generator=random) * 0.3
        tensors["d2t"] = torch.tensor(drafted) - torch.arange(len(drafted))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, torch.tensor(drafted), True)
        config |= {"speculators_model_type": "dflash", "transformer_layer_config": layer_config(vocab_size)}
        config |= {"draft_vocab_size": len(drafted), "target_hidden_size": target_hidden, "mask_token_id": MASK}
        config["aux_hidden_state_layer_ids"] = TARGET_LAYERS
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


class TorchDFlash:
    """The definition: a whole text at once, without a cache."""

    def __init__(self, folder: str, target: dict[str, Tensor]) -> None:
        """``target``: the tensors of the model, from which those come that the drafter lacks."""
        self._weights = load_file(Path(folder) / "model.safetensors")
        self._embedding = self._weights.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        self._lm_head = self._weights.get("lm_head.weight", target.get("lm_head.weight", self._embedding))

    def logits(self, aux: Tensor, next_id: int, num_drafts: int) -> Tensor:
        """``[num_drafts, tokens]`` of the drafts after ``next_id``, which follows the tokens of ``aux``.

        ``aux`` ``[tokens, width]``: the hidden states of the model after the target layers, joined.
        """
        context = self._rms(F.linear(aux, self._weights["fc.weight"]), "hidden_norm")
        x = F.embedding(torch.tensor([next_id] + [MASK] * num_drafts), self._embedding)
        for number in range(LAYERS):
            layer = f"layers.{number}"
            normed = self._rms(x, f"{layer}.input_layernorm")
            x = x + self._attention(layer, normed, torch.cat((context, normed)))
            normed = self._rms(x, f"{layer}.post_attention_layernorm")
            gate, up = (self._linear(normed, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"{layer}.mlp.down_proj")
        return F.linear(self._rms(x[1:], "norm"), self._lm_head)

    def _attention(self, layer: str, queries: Tensor, keys: Tensor) -> Tensor:
        """Every query sees all keys."""
        q = self._linear(queries, f"{layer}.self_attn.q_proj").view(len(queries), -1, DIM)
        k = self._linear(keys, f"{layer}.self_attn.k_proj").view(len(keys), -1, DIM)
        v = self._linear(keys, f"{layer}.self_attn.v_proj").view(len(keys), -1, DIM)
        angles = torch.arange(len(keys))[:, None, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        q = _rotated(self._rms(q, f"{layer}.self_attn.q_norm"), angles[-len(queries) :])
        k = _rotated(self._rms(k, f"{layer}.self_attn.k_norm"), angles)
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self._linear(out.transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self._weights[f"{name}.weight"]


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
