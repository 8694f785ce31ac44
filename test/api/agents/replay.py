"""Sends the requests of an agent to a server and reads the streams."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from test.api.server import RESPONSE_S

Json = dict[str, Any]


def stream(url: str, body: Json, **headers: str) -> list[Json]:
    """The JSON of the events of a streamed response. Raises HTTPError if the status is not 200."""
    headers |= {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
        lines = response.read().decode().splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(data) for data in found if data != "[DONE]"]
