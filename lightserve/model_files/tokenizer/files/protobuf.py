"""The fields of a protobuf message, without its schema."""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | bytes  # bytes: a string, an embedded message or a fixed-width number, little-endian

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BITS = 70  # ten bytes of seven bits


class ProtobufError(ValueError):
    """The bytes are not a protobuf message."""


def read_fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(field number, value) in the order of the message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if number == 0:
            raise ProtobufError(f"field number 0 at byte {position}")
        value, position = _value(data, position, wire_type)
        yield number, value


def _value(data: bytes, position: int, wire_type: int) -> tuple[Value, int]:
    if wire_type == _VARINT:
        return _varint(data, position)
    if wire_type == _BYTES:
        length, position = _varint(data, position)
    elif wire_type in (_FIXED64, _FIXED32):
        length = 8 if wire_type == _FIXED64 else 4
    else:
        raise ProtobufError(f"unknown wire type {wire_type} at byte {position}")
    end = position + length
    if end > len(data):
        raise ProtobufError(f"it ends at byte {len(data)}, in the middle of a field of {length} bytes")
    return data[position:end], end


def _varint(data: bytes, position: int) -> tuple[int, int]:
    if position < len(data) and data[position] < 0x80:  # nearly always
        return data[position], position + 1
    value = 0
    for shift in range(0, _MAX_VARINT_BITS, 7):
        if position >= len(data):
            raise ProtobufError(f"it ends at byte {len(data)}, in the middle of a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ProtobufError(f"a number of more than ten bytes at byte {position}")


def as_signed(value: Value) -> int:
    """An int32 or enum field."""
    if isinstance(value, bytes):
        raise ProtobufError("bytes instead of a number")
    return value - 2**64 if value >= 2**63 else value


def as_float(value: Value) -> float:
    if not isinstance(value, bytes) or len(value) != 4:
        raise ProtobufError("a float of another width than four bytes")
    number: float = struct.unpack("<f", value)[0]
    return number


def as_bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise ProtobufError("a number instead of bytes")
    return value


def as_text(value: Value) -> str:
    return as_bytes(value).decode()
