"""``tokenizer.model`` of SentencePiece: BPE by scores or a unigram model, with byte fallback."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lightserve.model_files.tokenizer.files.base import TokenizerFile
from lightserve.model_files.tokenizer.files.byte_pairs import merges_of
from lightserve.model_files.tokenizer.files.sentencepiece_file import (
    SPACE,
    Algorithm,
    Piece,
    PieceType,
    SentencePieceModel,
    read_sentencepiece,
)
from lightserve.model_files.tokenizer.files.settings import TokenizerSettings
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens

IN_TEXT = (PieceType.NORMAL, PieceType.USER_DEFINED)  # what a text without special tokens consists of


# A character of a user-defined piece in a unigram model. Other pieces for the same text have negative scores.
USER_DEFINED_SCORE = 1.0


class Prefix(Enum):
    """Where a space is added before a text."""

    NONE = "none"
    TEXT = "text"  # before the whole text
    PARTS = "parts"  # also after each special token: transformers' ``legacy``


class Family(NamedTuple):
    """How a tokenizer class uses its SentencePiece model."""

    adds_bos: bool = True  # unless the config says something else
    more_tokens: tuple[str, ...] = ()  # with the ids after the pieces
    before: tuple[str, ...] = ()  # before each text, instead of bos
    special: tuple[str, ...] = ()  # pieces that are special tokens


_LLAMA = Family()
_CHATGLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_CHATGLM = Family(
    more_tokens=("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *_CHATGLM_ROLES), before=("[gMASK]", "sop")
)
# by tokenizer class; the classes from Baichuan on are Python code in the folders of their models
FAMILIES = {
    "": _LLAMA,
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "TokenizersBackend": _LLAMA,
    "PreTrainedTokenizer": _LLAMA,
    "MistralTokenizer": _LLAMA,
    "GemmaTokenizer": Family(special=("<start_of_turn>", "<end_of_turn>")),
    "Phi3Tokenizer": _LLAMA,
    "BaichuanTokenizer": _LLAMA,
    "InternLMTokenizer": _LLAMA,
    "InternLM2Tokenizer": _LLAMA,
    "InternLM3Tokenizer": _LLAMA,
    "OrionTokenizer": _LLAMA,
    "SkyworkTokenizer": _LLAMA,
    "YiTokenizer": _LLAMA,
    "ChatGLMTokenizer": _CHATGLM,
}


class SentencePieceFile(TokenizerFile):
    def __init__(self, path: Path, settings: TokenizerSettings) -> None:
        self._family = FAMILIES[settings.class_name]
        self._model = read_sentencepiece(path)
        super().__init__(path, settings)
        self._pieces = with_added(self._model.pieces, {i: token.content for i, token in self.added.items()})

    @property
    def special(self) -> SpecialTokens:
        model = self._model
        return self._roles(model.token(i) for i in (model.bos_id, model.eos_id, model.unk_id, model.pad_id))

    def id_of(self, token: str) -> int | None:
        return next((i for i, piece in enumerate(self._pieces) if piece.text == token), None)

    def _added(self) -> dict[int, AddedToken]:
        """Control pieces too: chat templates write them as text."""
        pieces = self._model.pieces
        more = [
            AddedToken(text, normalized=False, special=True, single_word=text.isalpha())  # "sop" is not "philosophy"
            for text in self._family.more_tokens
        ]
        control = {
            i: AddedToken(piece.text, normalized=False, special=True)
            for i, piece in enumerate(pieces)
            if piece.text and (piece.type is PieceType.CONTROL or piece.text in self._family.special)
        }
        family_tokens = dict(enumerate(more, len(pieces)))
        added = control | family_tokens
        for token_id, token in self.settings.added.items():
            is_own = token_id in family_tokens and family_tokens[token_id].content == token.content
            if not is_own and not self._is_user_defined(token_id, token):
                added[token_id] = token
        return {token_id: self._in_raw_text(token) for token_id, token in sorted(added.items())}

    def _is_user_defined(self, token_id: int, token: AddedToken) -> bool:
        """Configs list these pieces too, but only the model file says that they are found in the normalized text."""
        if token.special or token_id >= len(self._model.pieces):
            return False
        piece = self._model.pieces[token_id]
        return piece.text == token.content and piece.type is PieceType.USER_DEFINED

    def _in_raw_text(self, token: AddedToken) -> AddedToken:
        """A normalizer that removes spaces would leave nothing of a token that consists of them."""
        if not (token.normalized and self._model.removes_extra_spaces):
            return token
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "special")}
        return AddedToken(token.content, normalized=False, **flags)

    def _backend(self) -> Tokenizer:
        has_prefix = self.settings.flag("add_prefix_space", self._model.adds_prefix)
        is_legacy = self.settings.flag("legacy", True)
        prefix = (Prefix.PARTS if is_legacy else Prefix.TEXT) if has_prefix else Prefix.NONE
        return sentencepiece_backend(self._model, self._pieces, prefix)

    def _surrounding(self) -> tuple[list[str], list[str]]:
        bos, eos = self._bos_and_eos(adds_bos=self._family.adds_bos)
        return list(self._family.before) or bos, eos


def with_added(pieces: Sequence[Piece], added: dict[int, str]) -> list[Piece]:
    """The pieces with added tokens in their places: after the others, or instead of a piece that is unused."""
    size = max(len(pieces), 1 + max(added, default=-1))
    missing = [Piece(f"<|unused_{i}|>", type=PieceType.UNUSED) for i in range(len(pieces), size)]
    result = [*pieces, *missing]
    for token_id, text in added.items():
        if result[token_id].text != text or result[token_id].type in IN_TEXT:
            result[token_id] = Piece(text, type=PieceType.CONTROL)
    return result


def sentencepiece_backend(model: SentencePieceModel, pieces: Sequence[Piece], prefix: Prefix) -> Tokenizer:
    """Raise ValueError for a vocabulary that the tokenizers library cannot represent."""
    is_bpe = model.algorithm is Algorithm.BPE
    user_defined = [piece.text for piece in pieces if piece.type is PieceType.USER_DEFINED and piece.text and is_bpe]
    changes_ends = prefix is not Prefix.NONE or model.removes_extra_spaces  # of the whole text, not of its parts
    splits = bool(user_defined) and changes_ends
    backend = Tokenizer(_bpe(model, pieces, splits) if is_bpe else _unigram(model, pieces))
    backend.normalizer = _normalizer(model, prefix)
    steps = _prefix_steps(model, prefix) + ([_isolate(user_defined)] if splits else [])
    if steps:
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if not splits:  # pieces with a space are found in the normalized text
        backend.add_tokens([AddedToken(text, normalized=SPACE in text, special=False) for text in user_defined])
    strip = [decoders.Strip(content=" ", left=1)] if changes_ends else []
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*to_text, *strip])
    return backend


def _bpe(model: SentencePieceModel, pieces: Sequence[Piece], keeps_whole_pieces: bool) -> models.BPE:
    vocabulary = {piece.text: i for i, piece in reversed(list(enumerate(pieces)))}  # the first of equal ones counts
    normal = [piece for piece in pieces if piece.type in IN_TEXT]
    parts = {piece.text: vocabulary[piece.text] for piece in normal if piece.text}
    ranked = sorted(parts, key=lambda text: (-pieces[parts[text]].score, -len(text)))
    unused = [piece.text for piece in pieces if piece.type is PieceType.UNUSED]
    if merges_of(unused, parts):
        raise ValueError("a BPE model with unused pieces that are made of others is not supported")
    return models.BPE(
        vocab=vocabulary,
        merges=merges_of(ranked, parts),
        unk_token=pieces[model.unk_id].text,
        fuse_unk=True,
        byte_fallback=model.has_byte_fallback,
        ignore_merges=keeps_whole_pieces,
    )


def _unigram(model: SentencePieceModel, pieces: Sequence[Piece]) -> models.Unigram:
    """Scores as in sentencepiece: user-defined pieces are better than others that cover the same text.

    Pieces that no text becomes get a score below that of any other segmentation.
    """
    scores = [piece.score for piece in pieces if piece.type is PieceType.NORMAL] or [0.0]
    hidden = (min(scores) - 10) * (1 + max(len(piece.text) for piece in pieces))

    def score(piece: Piece) -> float:
        if piece.type is PieceType.USER_DEFINED:
            return len(piece.text) * USER_DEFINED_SCORE - 0.1
        return piece.score if piece.type is PieceType.NORMAL else hidden

    scored = [(piece.text, score(piece)) for piece in pieces]
    return models.Unigram(scored, unk_id=model.unk_id, byte_fallback=model.has_byte_fallback)


def _normalizer(model: SentencePieceModel, prefix: Prefix) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_extra_spaces:
        first = " " if prefix is Prefix.TEXT else ""  # with one space, the text has its prefix already
        steps += [normalizers.Replace(Regex(r"\A +"), first), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    if model.removes_extra_spaces:
        steps.append(normalizers.Replace(Regex(SPACE + r"+\z"), ""))
    return normalizers.Sequence([*steps, *([normalizers.Prepend(SPACE)] if prefix is Prefix.PARTS else [])])


def _prefix_steps(model: SentencePieceModel, prefix: Prefix) -> list[pre_tokenizers.PreTokenizer]:
    """A space before the text, even if it begins with one.

    ``Metaspace`` adds its character only if the text does not begin with it. After the normalizer no text begins with
    a plain space, so a first step adds that, and a second one replaces it.
    """
    if prefix is not Prefix.TEXT:
        return []
    if model.removes_extra_spaces:
        return [pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)]
    add = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False)
    return [add, pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False)]


def _isolate(texts: Iterable[str]) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(longest_of(texts)), behavior="isolated")


def longest_of(texts: Iterable[str]) -> str:
    """A regular expression that matches the longest of ``texts``. It shares their beginnings, to be fast."""
    followers: dict[str, list[str]] = {}
    may_end = False
    for text in texts:
        if text:
            followers.setdefault(text[0], []).append(text[1:])
        else:
            may_end = True
    branches = [re.escape(char) + longest_of(rest) for char, rest in followers.items()]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if may_end else "")
