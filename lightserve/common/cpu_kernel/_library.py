"""The C library of this package, and the signatures of its functions.

setup.py builds it if there is a compiler. It knows nothing of Python and torch: it takes addresses, so that one build
serves all versions of both. ``csrc/kernels.h`` explains the arguments.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from lightserve.utils.logger import init_logger

logger = init_logger(__name__)
BACKEND = "cpu_native"


class PackedWeight(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("bits", c_int32),
        ("group", c_int32),
        ("scale_bytes", c_int32),
        ("input_parts", c_int32),
        ("has_min", c_int32),
    )


class AttentionBatch(ctypes.Structure):
    _fields_ = (
        ("req_to_token", c_void_p),
        ("stride", c_int64),
        ("b_req_idx", c_void_p),
        ("b_start_loc", c_void_p),
        ("b_seq_len", c_void_p),
        ("b_ready_cache_len", c_void_p),
        ("count", c_int64),
    )


_X = (c_void_p, c_int64, c_int64)  # address, rows, stride
_NORM = (c_void_p, c_void_p, c_float)  # residual, weight, eps
_WEIGHT = (c_void_p, c_int64, c_int64)  # address, rows, columns
_CACHE = (c_void_p, c_int64, c_int64, c_int64)  # address, stride, kv heads, dim
_OPTIONS = (c_float, c_float, c_int64, c_int32, c_void_p, c_void_p)  # scale, softcap, window, causal, slopes, sinks
KERNELS: dict[str, tuple[Any, ...]] = {
    "ls_linear_packed": (c_void_p, *_X, c_void_p, c_void_p),
    "ls_add_norm_linear_packed": (c_void_p, *_X, c_void_p, c_void_p, *_NORM, c_int32),
    "ls_linear_float": (*_WEIGHT, *_X, c_void_p, c_void_p),
    "ls_add_norm_linear_float": (*_WEIGHT, *_X, c_void_p, c_void_p, *_NORM, c_int32),
    "ls_linear_bf16": (*_WEIGHT, *_X, c_void_p, c_void_p),
    "ls_add_norm_linear_bf16": (*_WEIGHT, *_X, c_void_p, c_void_p, *_NORM, c_int32),
    "ls_rms_norm": (*_X, c_int64, c_void_p, c_float, c_void_p, c_void_p),
    "ls_activate": (*_X, c_int64, c_int32, c_int32, c_void_p),
    "ls_rotary_write_kv": (*_X, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, *_CACHE),
    "ls_attention": (*_X, *_CACHE, POINTER(AttentionBatch), *_OPTIONS, c_void_p),
}
_SIGNATURES = KERNELS | {
    "ls_set_threads": (c_int32,),
    "ls_use_variant": (c_int32,),
    "ls_repeat": (c_void_p, c_int64),
}


def _load() -> ctypes.CDLL | None:
    paths = (Path(__file__).with_name(f"_native{suffix}") for suffix in EXTENSION_SUFFIXES)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    loaded = ctypes.CDLL(str(path))
    missing = [name for name in _SIGNATURES if not hasattr(loaded, name)]
    if missing:
        logger.warning("%s was built from older sources, without %s: pip install -e .", path, ", ".join(missing))
    for name in _SIGNATURES.keys() - missing:
        function = getattr(loaded, name)
        function.argtypes, function.restype = _SIGNATURES[name], None
    loaded.ls_variant.restype = c_char_p
    loaded.ls_call_of.argtypes, loaded.ls_call_of.restype = (c_char_p,), c_uint64
    loaded.ls_num_variants.restype = c_int32
    return loaded


def has_kernel(name: str) -> bool:
    """Whether the library was built, and from sources that have this function."""
    return library is not None and hasattr(library, name)


def multiplies_bf16() -> bool:
    """Whether the variant for this CPU has products of bfloat16; the others widen such weights."""
    return library is not None and library.ls_variant() == b"amx"


library = _load()  # None: it was not built
