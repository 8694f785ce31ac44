"""The tokenizer in a GGUF file of Gemma 4 gives the ids of transformers' tokenizer with the same vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GemmaTokenizer

from lightserve.model_files.gguf.header import GgufHeader
from lightserve.model_files.gguf.tokenizer import tokenizer_from_gguf

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("he", "ll"), ("▁", "▁"), ("\n", "\n"), ("▁▁", "▁▁")]
TOKENS = [*SPECIAL, *BYTES, *"▁thelo.,\nHé", *("".join(pair) for pair in MERGES), "<|tool_call>"]
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
TYPES = [CONTROL] * len(SPECIAL) + [BYTE] * len(BYTES) + [1] * (len(TOKENS) - len(SPECIAL) - len(BYTES))
TYPES[-1] = USER_DEFINED


@pytest.mark.parametrize("text", ["the hello", "  the\n\n\n    hell", "Héllo, 世界 🙂.", "the<|tool_call>hello\t", ""])
def test_ids_and_text_are_those_of_transformers(text: str) -> None:
    theirs = GemmaTokenizer(vocab={token: i for i, token in enumerate(TOKENS)}, merges=MERGES)
    theirs.add_tokens(["<|tool_call>"])
    metadata = {
        "model": "gemma4",
        "tokens": TOKENS,
        "scores": [0.0] * len(TOKENS),
        "token_type": TYPES,
        "merges": [" ".join(pair) for pair in MERGES],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
        "add_bos_token": True,
    }
    header = GgufHeader(Path("model.gguf"), {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, {})

    ours, special = tokenizer_from_gguf(header)

    ids = ours.encode(text).ids
    assert ids == [2, *theirs.encode(text, add_special_tokens=False)]
    assert ours.decode(ids) == text
    assert (special.bos, special.eos) == ("<bos>", "<eos>")
