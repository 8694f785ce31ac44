"""What a client does, as lines on stderr: a test waits for it as long as there are more."""

from __future__ import annotations

import sys
from typing import Any

import requests


def log_calls() -> None:
    """A line before each HTTP call of this process."""
    send = requests.Session.send

    def logged(self: requests.Session, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        print(request.method, request.path_url, file=sys.stderr, flush=True)
        return send(self, request, **kwargs)

    requests.Session.send = logged  # type: ignore[method-assign]
