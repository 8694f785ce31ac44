"""Files with a vocabulary, written by hand as the usual tools write them."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightserve.model_files.tokenizer.files.sentencepiece_file import Algorithm, Piece, PieceType

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = PieceType
BYTES = [Piece(f"<0x{byte:02X}>", type=BYTE) for byte in range(256)]
SPECIAL = [Piece("<unk>", type=UNKNOWN), Piece("<s>", type=CONTROL), Piece("</s>", type=CONTROL)]


def varint(value: int) -> bytes:
    value %= 2**64
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def message(fields: Mapping[int, Any]) -> bytes:
    """A protobuf message: int and bool are varints, float has four bytes, str and bytes have a length."""
    data = b""
    for number, value in fields.items():
        if isinstance(value, float):
            data += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            data += varint(number << 3) + varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            data += varint(number << 3 | 2) + varint(len(content)) + content
    return data


def sentencepiece_model(
    pieces: Sequence[Piece],
    algorithm: int = Algorithm.BPE,
    trainer: Mapping[int, Any] | None = None,
    normalizer: Mapping[int, Any] | None = None,
) -> bytes:
    """By default BPE with byte fallback and a prefix, and spaces are kept: the settings of Llama 2."""
    types = [{} if one.type is NORMAL else {3: int(one.type)} for one in pieces]
    listed = [
        message({1: message({1: one.text, 2: one.score} | kind)}) for one, kind in zip(pieces, types, strict=True)
    ]
    settings = {3: int(algorithm), 35: True} | dict(trainer or {})
    rules = {1: "identity", 3: True, 4: False} | dict(normalizer or {})
    return b"".join(listed) + message({2: message(settings), 3: message(rules)})


def scored(*texts: str, start: float = 0.0) -> list[Piece]:
    """Pieces that merge in this order."""
    return [Piece(text, start - i) for i, text in enumerate(texts)]


def tiktoken_file(tokens: Sequence[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


ALL_BYTES = [bytes([byte]) for byte in range(256)]


def write_folder(folder: Path, files: Mapping[str, Any]) -> Path:
    """``files``: bytes, text, or an object for JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, dict):
            content = json.dumps(content)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
