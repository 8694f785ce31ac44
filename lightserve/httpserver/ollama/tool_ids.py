"""Ids of tool calls, which Ollama's clients may leave out and chat templates may need."""

from __future__ import annotations


class ToolIds:
    """Gives a call without an id the next number, and gives a result the id of its call."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []  # name and id of the calls that have no result yet

    def of_call(self, name: str, given: str | None) -> str:
        call_id = given or self._next()
        self._open.append((name, call_id))
        return call_id

    def of_result(self, name: str | None, given: str | None) -> str:
        """The given id, else that of the first open call with this name, else that of the first open call."""
        by_id = [call for call in self._open if call[1] == given]
        by_name = [call for call in self._open if call[0] == name]
        if given and not by_id:
            return given
        call = next(iter(by_id or by_name or self._open), None)
        if call is None:
            return self._next()
        self._open.remove(call)
        return call[1]

    def _next(self) -> str:
        self._count += 1
        return f"{self._count:09d}"  # Mistral's templates need nine letters or digits
