"""A client of server-sent events that leaves a stream when the test says so, and comes back for it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from test.api.server import RESPONSE_S

Json = dict[str, Any]


@dataclass
class Event:
    data: str
    id: str | None

    @property
    def json(self) -> Json:
        parsed: Json = json.loads(self.data)
        return parsed


class EventClient:
    """One response. ``events`` has what was read."""

    def __init__(self, url: str, path: str, body: Json, last_id: str | None = None, **headers: str) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=RESPONSE_S)
        more = {} if last_id is None else {"Last-Event-ID": last_id}
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | more | headers)
        self._response = self._connection.getresponse()
        self.status = self._response.status
        self.events: list[Event] = []

    @property
    def local_port(self) -> int:
        port: int = self._connection.sock.getsockname()[1]
        return port

    @property
    def last_id(self) -> str:
        found = self.events[-1].id
        assert found is not None
        return found

    def error(self) -> Json:
        """Of a response that is none of events."""
        found: Json = json.loads(self._response.read())["error"]
        return found

    def read(self, count: int) -> list[Event]:
        for event in self._read_all():
            self.events.append(event)
            if len(self.events) == count:
                break
        return self.events

    def read_all(self) -> list[Event]:
        self.events += self._read_all()
        return self.events

    def read_until_cut(self) -> list[Event]:
        """The server dies in the middle."""
        with suppress(OSError, http.client.HTTPException):
            self.read_all()
        return self.events

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def _read_all(self) -> Iterator[Event]:
        data: list[str] = []
        event_id = None
        while line := self._response.readline():
            name, _, value = line.decode().rstrip("\n").partition(":")
            if name == "data":
                data.append(value.strip())
            elif name == "id":
                event_id = value.strip()
            elif not name and data:
                yield Event("\n".join(data), event_id)
                data, event_id = [], None
