"""GPU memory that can be given back while its addresses stay, by ctypes: torch gives none back without its addresses.

    reserve addresses ─▶ map pages ─▶ unmap (they are free for others) ─▶ map other pages ─▶ ... ─▶ free the addresses

Captured graphs contain addresses, so they are valid again when pages are mapped. What was in the memory is lost.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightserve.errors import ServerError

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2  # CUresult; 0 is success
IS_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: pages stay where they are, as those of cudaMalloc
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", c_int), ("id", c_int))


class Allocation(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_meta_data", c_void_p),
        ("flags", c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", Location), ("flags", c_int))


FUNCTIONS = {
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Allocation), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Allocation), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
}


@cache
def _driver() -> Any:
    library = ctypes.CDLL(LIBRARY)
    for name, types in FUNCTIONS.items():
        getattr(library, name).argtypes = types
    return library


class CudaMemoryMapper:
    def can_map(self, device: torch.device) -> bool:
        make_context_current(device)
        is_supported = c_int()
        with suppress(OSError, AttributeError):  # no such library, or an old one
            check(_driver().cuDeviceGetAttribute(byref(is_supported), IS_SUPPORTED, device.index))
        return bool(is_supported.value)

    def take(self, num_bytes: int, device: torch.device) -> CudaMappedMemory:
        return CudaMappedMemory(num_bytes, device)


class CudaMappedMemory:
    """A MappedMemory: see base.py. It has pages when it is made."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._location = Location(ON_DEVICE, device.index)
        self._allocation = Allocation(type=PINNED, location=self._location)
        self._has_pages = False
        self._address = c_uint64()
        make_context_current(device)
        granularity = c_size_t()
        check(_driver().cuMemGetAllocationGranularity(byref(granularity), byref(self._allocation), MINIMUM))
        self._size = -(-num_bytes // granularity.value) * granularity.value
        check(_driver().cuMemAddressReserve(byref(self._address), self._size, 0, 0, 0))
        self.restore()

    def __del__(self) -> None:
        if self._address.value and not sys.is_finalizing():
            with suppress(RuntimeError, ServerError):  # a GPU that has failed is lost with this process
                self.release()
                check(_driver().cuMemAddressFree(self._address, self._size))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = (self._address.value, False)  # it may be written
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": address, "version": 3}

    def tensor(self) -> Tensor:
        """All bytes. The memory lives as long as it does."""
        return torch.as_tensor(self, device=self._device)

    def release(self) -> None:
        if self._has_pages:
            make_context_current(self._device)  # and wait: what was launched may use the memory
            check(_driver().cuMemUnmap(self._address, self._size))
            self._has_pages = False

    def restore(self) -> None:
        if self._has_pages:
            return
        make_context_current(self._device)
        pages = self._new_pages()
        try:
            check(_driver().cuMemMap(self._address, self._size, 0, pages, 0))
        finally:
            check(_driver().cuMemRelease(pages))  # they stay as long as they are mapped
        self._has_pages = True
        access = Access(self._location, READ_AND_WRITE)
        check(_driver().cuMemSetAccess(self._address, self._size, byref(access), 1))

    def _new_pages(self) -> c_uint64:
        pages = c_uint64()
        torch.cuda.empty_cache()  # what torch has cached is not free for the driver
        result = _driver().cuMemCreate(byref(pages), self._size, byref(self._allocation), 0)
        if result == OUT_OF_MEMORY:
            free, _ = torch.cuda.mem_get_info(self._device)
            raise torch.OutOfMemoryError(f"CUDA out of memory: {self._size:,} bytes are needed, {free:,} are free")
        check(result)
        return pages


def make_context_current(device: torch.device) -> None:
    """The driver's calls need it in every thread; torch makes it current with its first call of the runtime there."""
    torch.cuda.synchronize(device)


def check(result: int) -> None:
    if result != 0:
        message = c_char_p()
        _driver().cuGetErrorString(result, byref(message))
        raise ServerError(f"the CUDA driver failed: {(message.value or b'unknown error').decode()} ({result})")
