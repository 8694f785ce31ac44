"""Images of requests: their bytes, sizes, pixels and tokens. There is no torch here."""
