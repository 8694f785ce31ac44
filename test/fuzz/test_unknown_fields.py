"""Whatever the names of unknown fields are, the header that warns of them is a header, and the body is accepted."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given, strategies as st

from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.http.body import validate
from lightserve.httpserver.http.unknown_fields import UnknownFields
from test.fuzz.profile import FUZZ

KNOWN = list(ChatBody.model_fields)
MESSAGE = {"role": "user", "content": "Hi"}
near = st.tuples(st.sampled_from(KNOWN), st.integers(0, 20), st.text(max_size=2)).map(
    lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] :]
)
names = (near | st.text(max_size=80)).filter(lambda name: name not in KNOWN and name not in ChatBody.other_fields)
objects = st.dictionaries(names, st.none() | st.booleans() | st.text(max_size=3), max_size=12)


@FUZZ
@given(top=objects, inner=objects)
def test_the_warning_is_one_header(top: dict[str, Any], inner: dict[str, Any]) -> None:
    body = validate(ChatBody, {**top, "messages": [inner | MESSAGE], "max_tokens": 1})

    warning = UnknownFields().check(body, is_strict=False, route="/v1/chat/completions")

    one = r'199 lightserve "unknown field [\w.?-]+; did you mean [\w.]+\?"'
    assert warning is None or re.fullmatch(f"{one}(, {one}){{0,4}}", warning, flags=re.ASCII)
