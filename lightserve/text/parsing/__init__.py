"""Splits a model's output into reasoning, content and tool calls. Text in, deltas out; independent of the server."""

from lightserve.text.parsing.deltas import (
    Call,
    CallArguments,
    CallStart,
    Content,
    Delta,
    Output,
    Reasoning,
    merge_deltas,
)
from lightserve.text.parsing.parser import OutputParser

__all__ = [
    "Call",
    "CallArguments",
    "CallStart",
    "Content",
    "Delta",
    "Output",
    "OutputParser",
    "Reasoning",
    "merge_deltas",
]
