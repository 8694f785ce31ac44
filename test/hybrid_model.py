"""A tiny model with recurrent layers, and the text that transformers generates with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 131
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 2000,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
CHAT_TEMPLATE = "{% for message in messages %}w1 {{ message.content }} {% endfor %}w2"


def save_hybrid_model(folder: Path) -> tuple[str, Any]:
    """The folder, and the model of transformers. A token is a word; w0 ends nothing."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **CONFIG)).float().eval()
    for weight in model.state_dict().values():
        weight.normal_(std=0.15)
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # words with spaces between them
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return str(folder), model


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest continuation, computed from scratch for each token."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def text_of(ids: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in ids)
