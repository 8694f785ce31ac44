"""The examples of the API pages: a real server gives the responses that a page shows."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from test.api.server import ServerProcess

pytestmark = pytest.mark.slow

TEXT = "".join(page.read_text() for page in sorted((Path(__file__).parents[2] / "docs" / "api").glob("*.md")))
EXAMPLES = re.findall(r"```\n((?:GET|POST) /[^\n]*)\n\n(.*?)\n```", TEXT, flags=re.DOTALL)
JSON = r"[{\[][\"{].*"  # one per line
# differs from run to run; what was cached is no input in Anthropic's usage
DRAWN = (
    r'("(?:chat)?cmpl-|"(?:resp|msg)_|"request_id":"(?:chatcmpl-)?|"created(?:_at)?":|"version":"|"cached_tokens":'
    r'|"(?:cache_read_)?input_tokens":)\w[\w.]*'
)


@pytest.mark.parametrize(("request_line", "documented"), EXAMPLES, ids=[line[:60] for line, _ in EXAMPLES])
def test_the_response_is_the_documented_one(server: ServerProcess, request_line: str, documented: str) -> None:
    found, shown = ask(server.url, request_line), re.sub(DRAWN, r"\g<1>0", documented)

    assert around_json(found) == around_json(shown)
    for one, other in zip(json_in(found), json_in(shown), strict=True):
        assert is_same(one, other), found


def ask(url: str, request_line: str) -> str:
    """The body as text, after the status if that is an error."""
    method, path, *body = request_line.split(" ", 2)
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, body[0].encode() if body else None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            text: str = response.read().decode()
    except urllib.error.HTTPError as error:
        text = f"{error.code} {error.read().decode()}"
    return re.sub(DRAWN, r"\g<1>0", text.rstrip("\n"))


def around_json(text: str) -> str:
    """``data:`` with or without its space, empty lines, the end marker, a status."""
    return re.sub(JSON, "", text)


def json_in(text: str) -> list[Any]:
    return [json.loads(one) for one in re.findall(JSON, text)]


def is_same(found: Any, shown: Any) -> bool:
    """Floating-point numbers may differ slightly between machines."""
    if isinstance(shown, float):
        return math.isclose(found, shown, abs_tol=0.01)
    if isinstance(shown, list):
        return len(found) == len(shown) and all(map(is_same, found, shown))
    if isinstance(shown, dict):
        return list(found) == list(shown) and all(is_same(found[name], shown[name]) for name in shown)
    return bool(found == shown)
