"""A model's output taken apart: reasoning, content, tool calls. Text in, deltas out; nothing else of the server."""

from lightserve.output_parsing.deltas import Call, CallArguments, CallStart, Content, Delta, Output, Reasoning, fold
from lightserve.output_parsing.parser import OutputParser, ToolCallParser

__all__ = [
    "Call",
    "CallArguments",
    "CallStart",
    "Content",
    "Delta",
    "Output",
    "OutputParser",
    "Reasoning",
    "ToolCallParser",
    "fold",
]
