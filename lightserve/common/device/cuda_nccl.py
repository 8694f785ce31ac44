"""NCCL by ctypes: a communicator with a trainer that does not use torch's process groups. Five functions suffice."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lightserve.errors import ServerError

UNIQUE_ID_BYTES = 128
LIBRARY = "libnccl.so.2"
UINT8, FLOAT32 = 1, 7  # ncclDataType_t
SUM = 0  # ncclRedOp_t


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


@cache
def _library() -> Any:
    """The one that torch was built with, if it came as a wheel; else the system's."""
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") is not None else None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    paths = [os.path.join(folder, "lib", LIBRARY) for folder in folders]
    for path in (*paths, LIBRARY):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
        return library
    raise ServerError(f"{LIBRARY} is not installed; install the nvidia-nccl wheel of this torch, or use gloo")


class NcclCommunicator:
    """One rank. ``__init__`` returns when all ranks are there."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        self._device = device
        self._comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            _check(
                _library().ncclCommInitRank(
                    ctypes.byref(self._comm), world_size, UniqueId.from_buffer_copy(unique_id), rank
                )
            )
            self._warm_up()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Wait for a tensor of ``root``, and write it into this one."""
        with torch.cuda.device(self._device):
            pointer = ctypes.c_void_p(tensor.data_ptr())
            size = ctypes.c_size_t(tensor.nbytes)
            _check(_library().ncclBroadcast(pointer, pointer, size, UINT8, root, self._comm, self._stream()))
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Without waiting for other ranks: the trainer may be gone."""
        if self._comm.value is not None:
            _library().ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()

    def _warm_up(self) -> None:
        """All ranks add up a zero first. A rank that left this out would make the others wait for ever."""
        zero = torch.zeros(1, device=self._device)
        pointer = ctypes.c_void_p(zero.data_ptr())
        _check(_library().ncclAllReduce(pointer, pointer, ctypes.c_size_t(1), FLOAT32, SUM, self._comm, self._stream()))
        torch.cuda.current_stream(self._device).synchronize()

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)


def _check(result: int) -> None:
    if result != 0:
        raise ServerError(f"NCCL failed: {_library().ncclGetErrorString(result).decode()}")
