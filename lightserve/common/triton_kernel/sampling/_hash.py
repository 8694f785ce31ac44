"""The hash behind sampling noise and watermarks. It gives the same numbers on every device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hash32(x):
    """lowbias32 in uint32, which wraps."""
    x = tl.mul(x ^ (x >> 16), 0x7FEB352D, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)
