"""The NCCL unique id is read as trainers store it, and nothing else is."""

from __future__ import annotations

import pytest

from lightserve.errors import InvalidRequestError
from lightserve.worker.weights.unique_id import read_unique_id

MODULE = b"vllm.distributed.device_communicators.pynccl_wrapper"
ID = bytes(range(128))


def text(value: bytes) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value + b"\x94"


def stored(content: bytes = ID, module: bytes = b"_ctypes", name: bytes = b"_unpickle") -> bytes:
    """As protocol 4 writes ``name(ncclUniqueId, ({}, content))`` of ``module``."""
    function = text(module) + text(name) + b"\x93\x94"
    struct = text(MODULE) + text(b"ncclUniqueId") + b"\x93\x94"
    state = b"}\x94C" + bytes([len(content)]) + content + b"\x94\x86\x94"
    body = function + struct + state + b"\x86\x94R\x94."
    return b"\x80\x04\x95" + len(body).to_bytes(8, "little") + body


def test_the_id_is_read() -> None:
    assert read_unique_id(stored()) == ID


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (stored(ID[:-1]), "127 bytes instead of 128"),
        (stored(module=b"os", name=b"system"), "it is no ncclUniqueId"),
        (stored()[:-40], "no NCCL unique id"),
        (b"", "no NCCL unique id"),
        (ID, "no NCCL unique id"),
        (b"\x80\x04" + b"N" * 5000, "the limit is 4096"),
    ],
)
def test_other_things_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_unique_id(content)
