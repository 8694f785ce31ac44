"""JSON schemas of clients: read once, within limits, for grammars and for parsers."""
