"""Calls one after the other in a section, each between markers of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Steps, Tape


@dataclass(frozen=True, slots=True)
class Section:
    begin: str
    end: str
    call_begin: str
    read_call: Callable[[Tape, Scribe], Steps[bool]]  # what follows call_begin; False, and the mark stands: no call

    def parse(self, tape: Tape, scribe: Scribe) -> Steps[None]:
        """Models forget the begin of the section: a call outside of one counts too."""
        while marker := (yield from tape.pass_until((self.begin, self.call_begin), scribe.content)):
            tape.mark(len(marker))
            is_call = marker == self.call_begin or (yield from tape.accept_next(self.call_begin))
            if is_call and (yield from self.read_call(tape, scribe)):
                yield from tape.accept_next(self.end)
            else:
                scribe.content(tape.unmark())
