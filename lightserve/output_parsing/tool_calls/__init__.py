"""How models write tool calls: one module a format, see formats.py for all of them."""
