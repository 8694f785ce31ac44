"""``lightserve bench``: measures a server or a model. Benchmarks for developers are in ``benchmark/``."""
