"""Lines of a file: a body has no more levels than can be sent to its route and written to the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from lightserve.batches.line import MAX_DEPTH, check_file, parse_line


def line(levels: int) -> bytes:
    """A request whose body has so many levels."""
    body = b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)
    return b'{"custom_id":"a","url":"/v1/completions","body":' + body + b"}"


@pytest.mark.parametrize(("levels", "codes"), [(MAX_DEPTH, []), (MAX_DEPTH + 1, ["invalid_body"])])
def test_a_body_of_too_many_levels_is_a_wrong_line(tmp_path: Path, levels: int, codes: list[str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line(levels))

    errors = check_file(path, "/v1/completions", 10_000).errors

    assert [error["code"] for error in errors] == codes
    assert all(f"more than {MAX_DEPTH} levels" in error["message"] for error in errors)


def test_a_body_of_the_most_levels_can_be_written() -> None:
    body: dict[str, Any] = parse_line(line(MAX_DEPTH)).body

    assert orjson.loads(orjson.dumps({"custom_id": "a", "response": {"body": body}}))
