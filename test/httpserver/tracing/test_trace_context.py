"""W3C Trace Context: which headers are valid, and what is returned."""

from __future__ import annotations

import pytest

from lightserve.httpserver.tracing.request_trace import trace_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("03", True), ("02", False)])
def test_a_valid_header_is_continued(flags: str, is_sampled: bool) -> None:
    context = trace_context(f"00-{TRACE}-{SPAN}-{flags}".encode())

    assert (context.trace_id.hex(), context.parent_id.hex(), context.is_sampled) == (TRACE, SPAN, is_sampled)
    assert context.header(b"\x01" * 8) == f"00-{TRACE}-{'01' * 8}-{int(is_sampled):02d}".encode()


def test_a_later_version_may_have_more_fields() -> None:
    assert trace_context(f"01-{TRACE}-{SPAN}-01-more".encode()).trace_id.hex() == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
    ],
)
def test_an_invalid_header_begins_a_new_trace(header: str) -> None:
    first, second = trace_context(header.encode()), trace_context(header.encode())

    assert first.parent_id == b""
    assert first.is_sampled
    assert first.trace_id != second.trace_id
