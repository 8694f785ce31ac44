"""Builds a tokenizer from a GGUF file's metadata: vocabulary, merges or scores, token types, special ids."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from lightserve.errors import ModelFilesError
from lightserve.model_files.gguf.header import CONTROL, USER_DEFINED, GgufHeader
from lightserve.model_files.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from lightserve.model_files.tokenizer.files.sentencepiece import Prefix, sentencepiece_backend
from lightserve.model_files.tokenizer.files.sentencepiece_file import (
    SPACE,
    Algorithm,
    Piece,
    PieceType,
    SentencePieceModel,
)
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens, set_surrounding_tokens

WORD_PIECE = "bert"
# of BERT's own vocabulary, where a file does not have them
BERT_IDS = {"cls": 101, "seperator": 102, "unknown": 100, "padding": 0, "mask": 103}
MERGING = ("gpt2", "gemma4")  # kinds that find user-defined tokens before the text is split


def tokenizer_from_gguf(header: GgufHeader) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    kind = _field(header, "model")
    if kind not in _BUILDERS:
        raise ModelFilesError(
            f"{header.path}: tokenizer model {kind!r} is not supported; supported: {', '.join(_BUILDERS)}"
        )
    tokens: list[str] = _field(header, "tokens")
    tokens = _with_continuations(header, tokens) if kind == WORD_PIECE else tokens
    backend = _BUILDERS[kind](header, tokens)
    types = header.metadata.get("tokenizer.ggml.token_type", [])
    backend.add_special_tokens(_of_type(tokens, types, CONTROL, is_special=True))
    user_defined = _of_type(tokens, types, USER_DEFINED, is_special=False)
    backend.add_tokens([token for token in user_defined if kind in MERGING or SPACE not in token.content])

    if kind == WORD_PIECE:
        return backend, _surround_words(backend, header, tokens)
    special = SpecialTokens(*(_token(header, tokens, role) for role in ("bos", "eos", "unknown", "padding")))
    adds_bos = header.metadata.get("tokenizer.ggml.add_bos_token", _adds_bos(header, kind))
    adds_eos = header.metadata.get("tokenizer.ggml.add_eos_token", kind == "t5")
    before = [special.bos] if adds_bos and special.bos is not None else []
    after = [special.eos] if adds_eos and special.eos is not None else []
    set_surrounding_tokens(backend, before, after)
    return backend, special


def _adds_bos(header: GgufHeader, kind: str) -> bool:
    return kind in ("llama", "gemma4") or (kind == "gpt2" and _pre_tokenizer(header).adds_bos)


def _byte_level_bpe(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    pre = _pre_tokenizer(header)
    merges = [_pair(merge) for merge in _field(header, "merges")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=pre.keeps_whole_tokens)
    )
    backend.normalizer = normalizers.NFC() if pre.is_nfc else None
    backend.pre_tokenizer = pre.steps()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelFilesError(
            f"{header.path}: pre-tokenizer {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece_bpe(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    """llama.cpp always falls back to bytes, and replaces no characters."""
    pieces = _pieces(header, tokens)
    unk_id = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = SentencePieceModel(pieces, Algorithm.BPE, has_byte_fallback=True, unk_id=unk_id, removes_extra_spaces=False)
    return sentencepiece_backend(model, pieces, _prefix(header))


def _gemma4_bpe(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    """Merges of characters, with ▁ for spaces, and bytes for characters that no token has."""
    merges, unknown = [_pair(merge) for merge in _field(header, "merges")], _token(header, tokens, "unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=_vocabulary(tokens), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _with_continuations(header: GgufHeader, tokens: list[str]) -> list[str]:
    """In the file ▁ begins a word, and nothing marks what continues one, as ``##`` does in BERT's vocabulary."""
    types = header.metadata.get("tokenizer.ggml.token_type", [PieceType.NORMAL] * len(tokens))
    return [_with_continuation(token, kind) for token, kind in zip(tokens, types, strict=True)]


def _with_continuation(token: str, kind: int) -> str:
    if kind == CONTROL or _is_bracketed(token):
        return token
    return token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"


def _is_bracketed(token: str) -> bool:
    """``[CLS]`` and the like, which older files have as they are, whatever their type."""
    return len(token) > len("[]") and token.startswith("[") and token.endswith("]")


def _word_piece(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    unknown = _bert_token(header, tokens, "unknown")
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=_vocabulary(tokens), unk_token=unknown))
    is_cased = any(token != token.lower() for token in tokens if not _is_bracketed(token))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _surround_words(backend: tokenizers.Tokenizer, header: GgufHeader, tokens: list[str]) -> SpecialTokens:
    first, last, unknown, padding, mask = (_bert_token(header, tokens, role) for role in BERT_IDS)
    backend.add_special_tokens([AddedToken(token, special=True) for token in (first, last, unknown, padding, mask)])
    set_surrounding_tokens(backend, [first], [last])
    return SpecialTokens(unk=unknown, pad=padding, mask=mask)


def _bert_token(header: GgufHeader, tokens: list[str], role: str) -> str:
    token = _token(header, tokens, role, BERT_IDS[role])
    assert token is not None
    return token


def _unigram(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    pieces = _pieces(header, tokens)
    model = SentencePieceModel(
        pieces,
        Algorithm.UNIGRAM,
        has_byte_fallback=any(piece.type is PieceType.BYTE for piece in pieces),
        unk_id=header.metadata.get("tokenizer.ggml.unknown_token_id", 2),
        charsmap=bytes(byte & 0xFF for byte in header.metadata.get("tokenizer.ggml.precompiled_charsmap", ())),
        removes_extra_spaces=header.metadata.get("tokenizer.ggml.remove_extra_whitespaces", False),
    )
    return sentencepiece_backend(model, pieces, _prefix(header))


def _prefix(header: GgufHeader) -> Prefix:
    return Prefix.PARTS if header.metadata.get("tokenizer.ggml.add_space_prefix", True) else Prefix.NONE


_BUILDERS = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
    "gemma4": _gemma4_bpe,
    "t5": _unigram,
    WORD_PIECE: _word_piece,
}


_IN_GGUF = {int(kind): kind for kind in (PieceType.NORMAL, PieceType.UNKNOWN, PieceType.BYTE)}


def _pieces(header: GgufHeader, tokens: list[str]) -> list[Piece]:
    """Control and user-defined tokens are found before the text is split, unless they are written with ``▁``.

    Unused ones pad the vocabulary.
    """
    types = header.metadata.get("tokenizer.ggml.token_type", [PieceType.NORMAL] * len(tokens))
    rows = zip(tokens, _field(header, "scores"), types, strict=True)
    return [Piece(text, score, _piece_type(text, kind)) for text, score, kind in rows]


def _piece_type(text: str, kind: int) -> PieceType:
    if kind == USER_DEFINED and SPACE in text:
        return PieceType.USER_DEFINED
    return _IN_GGUF.get(kind, PieceType.CONTROL)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Of two equal tokens the first one counts, as in llama.cpp."""
    return {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}


def _of_type(tokens: list[str], types: list[int], wanted: int, is_special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=is_special)
        for token, kind in zip(tokens, types, strict=False)
        if kind == wanted and token
    ]


def _token(header: GgufHeader, tokens: list[str], role: str, default: int | None = None) -> str | None:
    token_id: int | None = header.metadata.get(f"tokenizer.ggml.{role}_token_id", default)
    if token_id is None:
        return None
    if token_id >= len(tokens):
        raise ModelFilesError(
            f"{header.path}: {role}_token_id {token_id} is not below {len(tokens)}; convert the model again"
        )
    return tokens[token_id]


def _field(header: GgufHeader, name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in header.metadata:
        raise ModelFilesError(f"{header.path}: metadata {key} is missing; convert the model again with its tokenizer")
    return header.metadata[key]
