"""A tiny model that says text: a hundred tokens of one to three characters, for tests of what depends on them."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from lightserve.model_files import Tokenizer
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from test.models.tiny import build_hf

CHARACTERS = 'abcdexyz0123456789{}[]":,.- '
PIECES = ["ab", "ba", "abc", "12", "123", '{"', '":', '",', "00", "xy", "],", "}}", "tr", "ue", "true"]
EOS = "<end>"


def small_backend() -> tokenizers.Tokenizer:
    """Byte-level, as most are; ``PIECES`` are merged where all of their parts are there."""
    space = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters = [space.pre_tokenize_str(char)[0][0] for char in CHARACTERS + "true"]
    vocab = {char: i for i, char in enumerate(dict.fromkeys(characters))}
    merges = []
    for piece in PIECES:
        head, last = piece[:-1], piece[-1]
        head, last = ("tr", "ue") if piece == "true" else (head, last)
        merges.append((head, last))
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = space
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    return backend


def small_tokenizer() -> Tokenizer:
    return Tokenizer(small_backend(), SpecialTokens(eos=EOS), None)


def save_small_model(folder: Path, context_len: int | None = None) -> str:
    """Random weights, and more logits than the tokenizer has tokens. ``context_len``: None keeps it."""
    build_hf("llama-gqa").save_pretrained(folder)
    backend = small_backend()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = backend.token_to_id(EOS)
    if context_len is not None:
        config["max_position_embeddings"] = context_len
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return str(folder)
