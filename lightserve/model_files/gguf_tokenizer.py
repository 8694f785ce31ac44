"""Builds a tokenizer from a GGUF file's metadata: vocabulary, merges or scores, token types, special ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from lightserve.errors import ModelFilesError
from lightserve.model_files.gguf_header import CONTROL, USER_DEFINED, GgufHeader
from lightserve.model_files.special_tokens import SpecialTokens, set_surrounding_tokens

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_BLOOM_SPLIT = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001


class PreTokenizer(NamedTuple):
    """The steps before merging. ``split`` None: GPT-2's regular expression."""

    split: str | None = None
    is_nfc: bool = False
    has_single_digits: bool = False
    keeps_whole_tokens: bool = False  # a piece that is in the vocabulary becomes one token without merges
    adds_bos: bool = False  # unless the file has its own setting

    def steps(self) -> pre_tokenizers.PreTokenizer:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.has_single_digits else []
        split = [] if self.split is None else [pre_tokenizers.Split(Regex(self.split), behavior="isolated")]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None)
        return pre_tokenizers.Sequence([*digits, *split, byte_level])


_GPT2 = PreTokenizer()
_LLAMA3 = PreTokenizer(_LLAMA3_SPLIT, keeps_whole_tokens=True, adds_bos=True)
_QWEN2 = PreTokenizer(_QWEN2_SPLIT, is_nfc=True)

# by tokenizer.ggml.pre
PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": PreTokenizer(has_single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "bloom": PreTokenizer(_BLOOM_SPLIT),
}


def tokenizer_from_gguf(header: GgufHeader) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    kind = _field(header, "model")
    if kind not in _BUILDERS:
        raise ModelFilesError(
            f"{header.path}: tokenizer model {kind!r} is not supported; supported: {', '.join(_BUILDERS)}"
        )
    tokens: list[str] = _field(header, "tokens")
    backend = _BUILDERS[kind](header, tokens)
    types = header.metadata.get("tokenizer.ggml.token_type", [])
    backend.add_special_tokens(_of_type(tokens, types, CONTROL, is_special=True))
    backend.add_tokens(_of_type(tokens, types, USER_DEFINED, is_special=False))

    special = SpecialTokens(*(_token(header, tokens, role) for role in ("bos", "eos", "unknown", "padding")))
    adds_bos = header.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or _pre_tokenizer(header).adds_bos)
    adds_eos = header.metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [special.bos] if adds_bos and special.bos is not None else []
    after = [special.eos] if adds_eos and special.eos is not None else []
    set_surrounding_tokens(backend, before, after)
    return backend, special


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
    """SentencePiece merges the adjacent pair with the best score: BPE with merges ranked by score."""
    vocabulary = _vocabulary(tokens)
    merges = _merges_by_score(vocabulary, _field(header, "scores"))
    unknown = _token(header, tokens, "unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


_BUILDERS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Of two equal tokens the first one counts, as in llama.cpp."""
    return {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}


def _merges_by_score(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    ranked = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[token_id], -len(left), -len(right), left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _of_type(tokens: list[str], types: list[int], wanted: int, is_special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=is_special)
        for token, kind in zip(tokens, types, strict=False)
        if kind == wanted and token
    ]


def _token(header: GgufHeader, tokens: list[str], role: str) -> str | None:
    token_id: int | None = header.metadata.get(f"tokenizer.ggml.{role}_token_id")
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
