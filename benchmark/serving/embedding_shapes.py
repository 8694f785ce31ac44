"""Folders of embedding models without weights: a config of a known shape and a tokenizer of words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

# each is one token in the vocabularies of BERT and of these shapes
_TEXT = """
the of and to in for is on that by this with you it not or be are from at as your all have new more an was we
will home can us about if page my has search free but our one other do no information time they site he up may
what which their news out use any there see only so his when contact here business who web also now help get
view
"""
WORDS = _TEXT.split()
SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {  # all-MiniLM-L6-v2
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": 30522,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    },
    "qwen3-0.6b": {  # Qwen3-Embedding-0.6B
        "model_type": "qwen3",
        "architectures": ["Qwen3Model"],
        "vocab_size": 151669,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
}


def save_shape(folder: Path, name: str) -> None:
    """To be served with --load_format dummy. A text of n words has n + 2 tokens."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(vocab[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
