"""The parts of a model's output, in the pieces in which they arrive.

One delta is made for every token: a msgspec.Struct takes a fifth of the time of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec


class Content(msgspec.Struct, gc=False):
    text: str


class Reasoning(msgspec.Struct, gc=False):
    text: str


class CallStart(msgspec.Struct, gc=False):
    """The start of a tool call. Its arguments follow."""

    index: int
    id: str
    name: str
    is_custom: bool = False  # the tool takes any text, its input


class CallArguments(msgspec.Struct, gc=False):
    """A piece of the JSON text of a call's arguments, or of the input of a custom tool."""

    index: int
    text: str
    is_custom: bool = False


Delta = Content | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""  # JSON, or the input of a custom tool
    is_custom: bool = False


@dataclass(slots=True)
class Output:
    """A whole output, joined from its deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def merge_deltas(deltas: Iterable[Delta]) -> Output:
    contents: list[str] = []
    reasonings: list[str] = []
    calls: list[Call] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                contents.append(text)
            case Reasoning(text):
                reasonings.append(text)
            case CallStart(_, call_id, name, is_custom):
                calls.append(Call(call_id, name, is_custom=is_custom))
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return Output("".join(contents), "".join(reasonings), calls)
