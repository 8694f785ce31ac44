"""With which weights the tokens of a request were generated, for requests that a weight update interrupts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from lightserve.messages.output import WeightsReplaced

DEFAULT = "default"  # of weights that were never replaced


class VersionSpan(NamedTuple):
    version: str
    start: int
    end: int  # exclusive


Json = dict[str, str | int]


class WeightVersions:
    """Of all sequences of a generation, by index. A token costs nothing: only changes are recorded."""

    def __init__(self) -> None:
        self._changes: dict[int, list[tuple[int, str]]] = {}  # where versions begin

    def begin(self, index: int, version: str) -> None:
        """The sequence has its first token."""
        self._changes[index] = [(0, version or DEFAULT)]

    def replace(self, index: int, version: str, output_len: int) -> None:
        """The tokens from number ``output_len`` on have other weights."""
        if changes := self._changes.get(index):
            changes.append((output_len, version))

    def last(self, index: int) -> str:
        changes = self._changes.get(index)
        return changes[-1][1] if changes else DEFAULT

    def spans(self, index: int, num_tokens: int) -> list[VersionSpan]:
        """Of this number of tokens."""
        changes = self._changes.get(index, [])
        ends = [begin for begin, _ in changes[1:]] + [num_tokens]
        spans: list[VersionSpan] = []
        for (begin, version), end in zip(changes, ends, strict=True):
            if begin >= min(end, num_tokens):
                continue
            if spans and spans[-1].version == version:
                spans[-1] = spans[-1]._replace(end=min(end, num_tokens))
            else:
                spans.append(VersionSpan(version, begin, min(end, num_tokens)))
        return spans

    def json(self, index: int, num_tokens: int) -> list[Json]:
        return [span._asdict() for span in self.spans(index, num_tokens)]


class Versioned(Protocol):
    @property
    def versions(self) -> WeightVersions: ...


def record_versions(message: WeightsReplaced, running: Mapping[int, tuple[Versioned, int]]) -> None:
    """``running``: generations, and the indices of their sequences there, by request id."""
    for req in message.reqs:
        if entry := running.get(req.req_id):
            entry[0].versions.replace(entry[1], message.version, req.output_len)
