"""Model folders for benchmarks: a config of a given shape and a real tokenizer, without weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from lightserve.bench.client.dataset import WORDS
from lightserve.model_files.source import resolve
from lightserve.model_files.tokenizer.tokenizer import load_tokenizer

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
WORD_VOCAB = 4096  # where the shape has none
LLAMA3_8B = LARGE | {"vocab_size": 128_256, "max_position_embeddings": 32_768}


def save_model(folder: Path, model_dir: str | None, shape: dict[str, int]) -> None:
    """Write a config and the tokenizer of ``model_dir``, to be served with random weights (--load_format dummy)."""
    source = resolve(model_dir, needs_weights=False)
    tokenizer = load_tokenizer(source)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": source.hf_config()["vocab_size"],
        **shape,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": list(source.eos_token_ids()),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer.eos_token}))


def save_word_model(folder: Path, shape: dict[str, int]) -> Path:
    """A Llama whose tokens are words: those of the benchmark's client, so that lengths are exact, and made-up ones.

    Nothing has to be downloaded, and no text ends by itself.
    """
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": WORD_VOCAB,
        "max_position_embeddings": 4096,
        **shape,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = dict.fromkeys(["<end>", *WORDS])
    names = [*words, *(f"w{i}" for i in range(len(words), shape.get("vocab_size", WORD_VOCAB)))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder
