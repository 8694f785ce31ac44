"""Forms with files arrive in pieces of any size, with contents that look like boundaries."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from starlette.requests import Request
from starlette.types import Message

from lightserve.errors import RequestError
from lightserve.httpserver.http.multipart import Form, read_form
from test.fuzz.profile import FUZZ

BOUNDARY = "xYz"
LIMIT = 1000
near_boundaries = st.sampled_from([b"\r\n", b"--", b"\r\n--", b"--xY", b"\r\n--xY", b"xYz", b"\r", b"\x00"])
contents = st.lists(near_boundaries | st.binary(max_size=5), max_size=6).map(b"".join)
contents = contents.filter(lambda content: b"\r\n--xYz" not in b"\r\n" + content)
cuts = st.lists(st.integers(0, 400), max_size=6)


def encoded(content: bytes, purpose: str) -> bytes:
    head = b'--xYz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n' % purpose.encode()
    file = b'--xYz\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\nContent-Type: x/y\r\n\r\n'
    return head + file + content + b"\r\n--xYz--\r\n"


def read(body: bytes, at: Sequence[int]) -> tuple[Form, bytes]:
    ends = sorted({0, *(min(cut, len(body)) for cut in at), len(body)})
    pieces = [body[begin:end] for begin, end in pairwise(ends)]

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    header = (b"content-type", f"multipart/form-data; boundary={BOUNDARY}".encode())
    request = Request({"type": "http", "method": "POST", "headers": [header]}, receive)
    sink = io.BytesIO()
    form = asyncio.run(read_form(request, Form(sink, LIMIT, "--limit")))
    return form, sink.getvalue()


@FUZZ
@given(content=contents, purpose=st.sampled_from(["batch", "", "é\u2028"]), at=cuts)
def test_a_form_is_read_as_it_was_written(content: bytes, purpose: str, at: list[int]) -> None:
    form, stored = read(encoded(content, purpose), at)

    assert stored == content
    assert form.fields == {"purpose": purpose}
    assert (form.filename, form.num_bytes) == ("a b.jsonl", len(content))


@FUZZ
@given(
    body=st.binary(max_size=300) | st.builds(lambda end: encoded(b"abc", "batch")[:end], st.integers(1, 150)), at=cuts
)
def test_what_is_no_form_is_refused(body: bytes, at: list[int]) -> None:
    with pytest.raises(RequestError):
        read(body or b"x", at)


def test_a_file_over_the_limit_is_refused() -> None:
    with pytest.raises(RequestError, match="larger than 1000 bytes"):
        read(encoded(b"x" * 1001, "batch"), [500])
    with pytest.raises(RequestError, match="headers of a part"):
        read(b"--xYz\r\n" + b"x" * 10_000, [500])
