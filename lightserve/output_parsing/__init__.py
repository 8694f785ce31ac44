"""Splits a model's output into reasoning, content and tool calls. Text in, deltas out; independent of the server."""

from lightserve.output_parsing.deltas import (
    Call,
    CallArguments,
    CallStart,
    Content,
    Delta,
    Output,
    Reasoning,
    merge_deltas,
)
from lightserve.output_parsing.parser import OutputParser

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
