"""JSON schemas of clients: read once, within limits, for grammars and for parsers."""

from lightserve.json_schema.schema import JsonSchema as JsonSchema
