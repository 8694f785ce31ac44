"""Tiny random pooling models: transformers' model as the oracle, and its folder for ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig

VOCAB_SIZE = 131
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 64,
    "max_position_embeddings": 96,
    "pad_token_id": 1,
}
SPECIAL = ("[UNK]", "[PAD]", "[CLS]", "[SEP]")
CLS, SEP = 2, 3


def with_noise(model: Any) -> Any:
    """Noise is in every weight, since norms of 1 and biases of 0 hide errors."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator) * 0.15
        weight.data.copy_(noise + (1 if "norm" in name.lower() and name.endswith("weight") else 0))
    return model.float().eval()


def new_model(auto_class: Any, model_type: str, **fields: Any) -> Any:
    """A model of ``auto_class``, such as AutoModel, with noise in every weight."""
    torch.manual_seed(0)
    return with_noise(auto_class.from_config(AutoConfig.for_model(model_type, **SMALL | fields)))


def save(model: Any, folder: Path, **config: Any) -> Path:
    """The folder of a model, with a tokenizer of words. ``config`` replaces fields of config.json."""
    model.save_pretrained(folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    word_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"cls_token": "[CLS]", "sep_token": "[SEP]"}')
    return folder


def word_tokenizer() -> Tokenizer:
    """Token i is the word wi; a text is [CLS] text [SEP], a pair [CLS] a [SEP] b [SEP]."""
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB_SIZE - 2)), "no", "yes"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


def add_sentence_transformers(
    folder: Path, pooling: str, prompts: dict[str, str] | None = None, dense: tuple[int, int] | None = None
) -> None:
    """``pooling``: the flag of 1_Pooling/config.json. ``dense``: sizes of a dense layer with random weights."""
    modules = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(modules) if i)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(modules, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, pooling: True}))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    if dense is not None:
        add_dense(folder / "2_Dense", *dense)


def add_dense(folder: Path, in_size: int, out_size: int) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    config = {
        "in_features": in_size,
        "out_features": out_size,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {"linear.weight": torch.randn(out_size, in_size, generator=generator)}
    tensors["linear.bias"] = torch.randn(out_size, generator=generator)
    save_file(tensors, folder / "model.safetensors")
