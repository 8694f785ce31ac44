"""Reads a SentencePiece model: its pieces, and the settings that decide how a text is encoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from lightserve.errors import ModelFilesError
from lightserve.model_files.tokenizer.files.protobuf import (
    ProtobufError,
    Value,
    as_bytes,
    as_float,
    as_signed,
    as_text,
    read_fields,
)

SPACE = "▁"  # stands for a space in pieces
_TEXT_KEY, _SCORE_KEY = 1 << 3 | 2, 2 << 3 | 5  # of a piece


class PieceType(IntEnum):
    """The numbers of ``sentencepiece_model.proto``, which GGUF uses too."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Algorithm(IntEnum):
    UNIGRAM = 1
    BPE = 2


class Piece(NamedTuple):
    text: str
    score: float = 0.0
    type: PieceType = PieceType.NORMAL


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The defaults are those of ``sentencepiece_model.proto``."""

    pieces: Sequence[Piece]
    algorithm: Algorithm = Algorithm.UNIGRAM
    has_byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1  # negative: there is none
    charsmap: bytes = b""  # compiled rules that replace characters before the text is split
    adds_prefix: bool = True  # a space before the text
    removes_extra_spaces: bool = True  # at both ends, and all but one between words

    def token(self, token_id: int) -> str | None:
        return self.pieces[token_id].text if 0 <= token_id < len(self.pieces) else None


def read_sentencepiece(path: Path) -> SentencePieceModel:
    try:
        return _parse(path.read_bytes())
    except (OSError, ValueError) as error:  # ProtobufError and UnicodeDecodeError are ValueErrors
        raise ModelFilesError(f"{path}: not readable as a SentencePiece model ({error}); download it again") from error


def _parse(data: bytes) -> SentencePieceModel:
    fields = list(read_fields(data))
    pieces = [_piece(as_bytes(value)) for number, value in fields if number == 1]
    trainer, normalizer, denormalizer = ({**_last(fields, number)} for number in (2, 3, 5))
    _check(pieces, trainer, normalizer, denormalizer)
    return SentencePieceModel(
        pieces,
        algorithm=Algorithm(as_signed(trainer.get(3, 1))),
        has_byte_fallback=bool(trainer.get(35, False)),
        unk_id=as_signed(trainer.get(40, 0)),
        bos_id=as_signed(trainer.get(41, 1)),
        eos_id=as_signed(trainer.get(42, 2)),
        pad_id=as_signed(trainer.get(43, 2**64 - 1)),
        charsmap=as_bytes(normalizer.get(2, b"")),
        adds_prefix=bool(normalizer.get(3, True)),
        removes_extra_spaces=bool(normalizer.get(4, True)),
    )


def _last(fields: Sequence[tuple[int, Value]], wanted: int) -> dict[int, Value]:
    """The fields of an embedded message; of a repeated field the last value."""
    messages = [as_bytes(value) for number, value in fields if number == wanted]
    return dict(read_fields(b"".join(messages)))


def _piece(data: bytes) -> Piece:
    # A normal piece has a short text and a score. To read it so takes a third of the time, of 3 s for 256,000 pieces.
    if len(data) > 7 and data[0] == _TEXT_KEY and data[1] == len(data) - 7 and data[-5] == _SCORE_KEY:
        return Piece(data[2:-5].decode(), _score(data[-4:]))
    fields = dict(read_fields(data))
    kind = PieceType(as_signed(fields.get(3, 1)))
    return Piece(as_text(fields.get(1, b"")), _score(fields.get(2, bytes(4))), kind)


def _score(value: Value) -> float:
    score = as_float(value)
    if not math.isfinite(score):
        raise ProtobufError(f"the score {score} of a piece")
    return score


def _check(
    pieces: Sequence[Piece], trainer: dict[int, Value], normalizer: dict[int, Value], denormalizer: dict[int, Value]
) -> None:
    """Refuse what sentencepiece refuses, and settings that are not implemented."""
    if not pieces:
        raise ProtobufError("it has no pieces")
    repeated = len(pieces) - len({piece.text for piece in pieces})
    if repeated:
        raise ProtobufError(f"{repeated} pieces occur twice")
    if sum(piece.type is PieceType.UNKNOWN for piece in pieces) != 1:
        raise ProtobufError("it has no unknown piece, or several")
    algorithm = as_signed(trainer.get(3, 1))
    if algorithm not in tuple(Algorithm):
        raise ProtobufError(f"model_type {algorithm}; supported: 1 (unigram) and 2 (bpe)")
    if trainer.get(24):
        raise ProtobufError("treat_whitespace_as_suffix is not supported")
    if not normalizer.get(5, True):
        raise ProtobufError("escape_whitespaces = false is not supported")
    if denormalizer.get(2):
        raise ProtobufError("a denormalizer is not supported")
