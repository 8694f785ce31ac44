"""The header ``traceparent`` of W3C Trace Context: which trace a request belongs to."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_SAMPLED = 0x01  # of the flags
_HEADER = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INVALID_VERSION, _FIRST_VERSION = b"ff", b"00"


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: bytes  # 16 bytes
    parent_id: bytes  # 8 bytes; empty: this request begins the trace
    is_sampled: bool  # the caller records this trace

    def header(self, span_id: bytes) -> bytes:
        """The header of the response: ``span_id`` is the span of this server."""
        return f"00-{self.trace_id.hex()}-{span_id.hex()}-{int(self.is_sampled):02x}".encode()


def trace_context(header: bytes) -> TraceContext:
    """The trace of a request. A header that is missing or invalid begins a new trace, as the standard says."""
    match = _HEADER.fullmatch(header.strip())
    if match is None or not _is_valid(*match.groups()):
        return TraceContext(os.urandom(16), b"", is_sampled=True)
    _, trace_id, parent_id, flags, _ = match.groups()
    return TraceContext(
        bytes.fromhex(trace_id.decode()), bytes.fromhex(parent_id.decode()), bool(int(flags, 16) & _SAMPLED)
    )


def _is_valid(version: bytes, trace_id: bytes, parent_id: bytes, flags: bytes, rest: bytes | None) -> bool:
    if version == _INVALID_VERSION or (version == _FIRST_VERSION and rest is not None):
        return False
    return any(byte != ord("0") for byte in trace_id) and any(byte != ord("0") for byte in parent_id)
