"""Merges for byte pair encoding, from vocabularies that only rank their tokens (SentencePiece, tiktoken, tekken).

Such a vocabulary merges the adjacent pair whose result has the best rank; of equal ones, the leftmost. The tokenizers
library ranks pairs, not results. So every pair with the same result gets a rank, next to each other. Their order only
matters if two of them overlap in a text, which no vocabulary that was trained has shown.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers


def merges_of(ranked: Iterable[str], vocabulary: Container[str]) -> list[tuple[str, str]]:
    """All pairs of tokens that together are one of ``ranked``, which begins with the best one."""
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# GPT-2's alphabet: a printable byte is its own character; the others map to U+0100 and up, in order
_CHAR_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)}


def to_byte_level(token: bytes) -> str:
    """The token as the tokenizers library stores bytes: one character each."""
    return token.decode("latin-1").translate(_CHAR_OF_BYTE)


def byte_level_backend(
    ids: Mapping[bytes, int], added: Mapping[int, str], split: str, is_nfc: bool = False
) -> Tokenizer:
    """A tokenizer as tiktoken builds it. Tokens with lower ids merge first. ``split`` is the regular expression.

    ``added`` are tokens with other ids, which no merge makes.
    """
    in_bytes = {to_byte_level(token): ids[token] for token in sorted(ids, key=ids.__getitem__)}
    vocabulary = {text: i for i, text in added.items()} | in_bytes
    merges = merges_of(in_bytes, in_bytes)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    if is_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split_bytes(split)
    backend.decoder = decoders.ByteLevel()
    return backend


def split_bytes(split: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level])
