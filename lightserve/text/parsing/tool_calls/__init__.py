"""The tool-call formats of models, one module each. formats.py lists all of them."""
